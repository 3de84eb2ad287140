"""Adapters of experts as PEFT makes them since version 0.18: experts are one parameter each for gate and up, and for
down, and `all-linear` also adapts the router. They are read, continued, merged and written as in PEFT."""

import json
from pathlib import Path

import lora_finetune
import pytest
import torch
import torch.nn.functional as F
from helpers import run_processes, save_checkpoint, weekly_but
from models.test_families import VARIANTS
from safetensors.torch import load_file
from torch.testing import assert_close

from tune import config, distributed
from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.models import ExpertLinear, Names, Router, build
from tune.peft import (
    LoRA,
    adapter_state_dict,
    add_adapters,
    export_adapter,
    initialize,
    load_adapter,
    merge,
    merge_in_place,
    open_model,
    read_adapter,
    switched_off,
)

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RUN_VARIANTS = Path(__file__).parents[1] / "recipes" / "run_variants.py"
TOKENS = torch.arange(5, 85).view(2, 40)
FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v3", "glm4_moe", "minimax_m2"]
GATE_UP, DOWN, ROUTER = "experts.gate_up_proj", "experts.down_proj", "gate.weight"


def checkpoint_of(family, folder):
    config_class, changes = VARIANTS[family]
    return save_checkpoint(folder, config_class, **{"pad_token_id": None} | changes)


def of_peft(base, adapter, **settings):
    """Save a random adapter of PEFT, and return its model."""
    settings = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8} | settings
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    theirs = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    theirs.save_pretrained(adapter)
    return theirs


def in_peft(base, adapter):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()


def continued(base, adapter):
    model = load_model(str(base))
    add_adapters(model, read_adapter(adapter))
    load_adapter(model, adapter)
    return model


def step(model, logits):
    """A step of plain gradient descent on the next token."""
    F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5).step()
    model.zero_grad()


def require_as_in_peft(base, adapter, tmp_path):
    """Compare logits, two training steps, the merged weights, and the exported adapter."""
    theirs, ours = in_peft(base, adapter), continued(base, adapter)
    logits = theirs(TOKENS).logits
    with switched_off(ours):
        assert (ours(TOKENS) - logits).abs().max() > 1e-2
    assert_close(ours(TOKENS), logits, atol=1e-5, rtol=1e-5)
    for _ in range(2):
        step(theirs, theirs(TOKENS).logits)
        step(ours, ours(TOKENS))
    trained = adapter_state_dict(ours)
    assert_close(trained, peft.get_peft_model_state_dict(theirs), atol=2e-6, rtol=2e-5)
    before = load_file(Path(adapter) / "adapter_model.safetensors")
    assert all((trained[name] - before[name]).abs().max() > 0 for name in trained if "router" not in name)
    export_adapter(ours, tmp_path / "trained", world=distributed.init("cpu"), base=base)
    logits = theirs(TOKENS).logits
    assert_close(in_peft(base, tmp_path / "trained")(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    assert_close(continued(base, tmp_path / "trained")(TOKENS), logits, atol=1e-5, rtol=1e-5)
    merge(base, tmp_path / "trained", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert_close(merged, theirs.merge_and_unload().state_dict(), atol=2e-6, rtol=1e-5)
    merge_in_place(ours)
    assert_close(ours(TOKENS), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.weekly
@pytest.mark.parametrize("family", weekly_but(["qwen3_moe", "qwen2_moe"], FAMILIES))
def test_all_linear_is_read_continued_merged_and_written(family, tmp_path):
    base = checkpoint_of(family, tmp_path / "base")
    of_peft(base, tmp_path / "adapter", target_modules="all-linear")
    require_as_in_peft(base, tmp_path / "adapter", tmp_path)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"target_parameters": [GATE_UP]}),
        ("qwen3_moe", {"target_parameters": [DOWN]}),
        ("qwen3_moe", {"target_parameters": [f"1.mlp.{ROUTER}"], "use_rslora": True}),
        ("mixtral", {"target_modules": ["w1", "w2", "w3"]}),
        ("mixtral", {"target_parameters": ["0.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]}),
        ("qwen3_moe", {"target_parameters": [DOWN, GATE_UP], "rank_pattern": {"gate_up_proj": 2, "down_proj": 3}}),
        ("qwen3_moe", {"target_modules": r".*\.[qv]_proj", "target_parameters": [ROUTER, DOWN, GATE_UP]}),
        ("qwen3_moe", {"target_parameters": [GATE_UP, ROUTER], "alpha_pattern": {r".*\.gate\.weight": 32}}),
        ("gpt_oss", {"target_parameters": ["router.weight", GATE_UP], "target_modules": ["o_proj"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value.values())),
)
def test_single_parameters_are_read_continued_merged_and_written(family, settings, tmp_path):
    base = checkpoint_of(family, tmp_path / "base")
    of_peft(base, tmp_path / "adapter", **{"target_modules": []} | settings)
    require_as_in_peft(base, tmp_path / "adapter", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_new_adapter_of_parameters_is_the_one_of_peft(family, tmp_path):
    """The same names and shapes, and the base's outputs at the start."""
    base, names = checkpoint_of(family, tmp_path / "base"), [GATE_UP, DOWN, ROUTER]
    theirs = of_peft(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=names)
    ours = load_model(str(base))
    before = ours(TOKENS)
    add_adapters(ours, LoRA(rank=4, alpha=8, target_modules=["q_proj"], target_parameters=names))
    initialize(ours, seed=1)
    assert_close(ours(TOKENS), before, atol=1e-6, rtol=1e-6)
    expected = {name: tensor.shape for name, tensor in peft.get_peft_model_state_dict(theirs).items()}
    assert {name: tensor.shape for name, tensor in adapter_state_dict(ours).items()} == expected
    step(ours, ours(TOKENS))
    export_adapter(ours, tmp_path / "ours", world=distributed.init("cpu"), base=base)
    logits = ours(TOKENS)
    assert (logits - before).abs().max() > 1e-3
    assert_close(in_peft(base, tmp_path / "ours")(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    assert_close(open_model(base, [tmp_path / "ours"]).load()(TOKENS), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_two_adapters_with_parameters_add_up_as_in_peft(tmp_path):
    base = checkpoint_of("qwen3_moe", tmp_path / "base")
    names = {"target_modules": ["q_proj"], "target_parameters": [GATE_UP, DOWN, ROUTER]}
    for name, rank in (("first", 4), ("second", 2)):
        of_peft(base, tmp_path / name, r=rank, **names)
    theirs = in_peft(base, tmp_path / "first")
    theirs.load_adapter(tmp_path / "second", adapter_name="second")
    theirs.base_model.set_adapter(["default", "second"])
    both = open_model(base, [tmp_path / "first", tmp_path / "second"]).load()
    assert_close(both(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.weekly
@pytest.mark.parametrize("layout", ["dp_shard=2", "ep=2", "tp=2", "pp=2", "resumed"])
def test_layouts_train_it_like_one_process(layout, chats, tmp_path):
    """Plain gradient descent, whose steps show the size of each gradient."""
    base = checkpoint_of("qwen3_moe", tmp_path / "base")
    of_peft(base, tmp_path / "adapter", target_modules="all-linear")
    recipe = "pipeline_finetune" if layout.startswith("pp") else "lora_finetune"
    common = [
        f"model.path={base}", f"dataset.path={chats}", "max_seq_len=128", "global_batch_size=8", "compute.dtype=fp32",
        "device=cpu", "optimizer={_component_: torch.optim.SGD, lr: 0.5}", "max_steps=4", "epochs=12",
        "checkpointer.every=2", f"adapter.path={tmp_path / 'adapter'}",
    ]  # fmt: skip
    lora_finetune.main(config.load("lora_finetune", [*common, f"output_dir={tmp_path / 'one'}"]))
    if layout == "resumed":
        resume = f"resume={tmp_path / 'one' / 'checkpoints' / 'step-00000002'}"
        lora_finetune.main(config.load("lora_finetune", [*common, resume, f"output_dir={tmp_path / 'many'}"]))
    else:
        variants = json.dumps({"many": [f"parallel.{layout}"]})
        run_processes(RUN_VARIANTS, 2, recipe, str(tmp_path), json.dumps(common), variants)
    losses = {
        name: [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("one", "many")
    }
    assert losses["many"] == pytest.approx(losses["one"][-len(losses["many"]) :], rel=1e-5)
    names = ("adapter", "one/adapter", "many/adapter")
    start, one, many = (load_file(tmp_path / name / "adapter_model.safetensors") for name in names)
    assert min((one[name] - start[name]).abs().max() for name in one) > 1e-3
    assert_close(many, one, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_names_of_parameters_are_those_of_transformers(tmp_path):
    """For all native families with experts, except the one whose experts PEFT cannot find."""
    found = 0
    for family, (config_class, changes) in VARIANTS.items():
        shape = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
        settings = getattr(transformers, config_class)(**shape | heads | changes)
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(settings)
        settings.architectures = [type(theirs).__name__]
        settings.save_pretrained(tmp_path)
        with torch.device("meta"):
            ours = build(str(tmp_path))
        names, parameters = Names.of(ours), dict(theirs.named_parameters())
        for name, module in ours.named_modules():
            if isinstance(module, ExpertLinear | Router) and not family.startswith("granitemoe"):
                assert names.parameter(name) in parameters, (family, name)
                found += 1
    assert found > 100


@pytest.mark.parametrize(
    ("family", "settings", "facts"),
    [
        ("qwen3_moe", {"target_parameters": ["gate_up"]}, "'gate_up' matches no weight.*down_proj, gate_up_proj"),
        ("qwen3_moe", {"target_parameters": [ROUTER], "dora": True}, "router, which dora=true does not support"),
        ("qwen3_moe", {"target_parameters": [GATE_UP], "init": "pissa"}, "experts, which init=pissa does not support"),
        ("granitemoe", {"target_parameters": ["input_linear.weight"]}, "has another name in transformers"),
        ("granitemoe", {"target_parameters": ["router.layer.weight"]}, "has another name in transformers"),
    ],
)
def test_parameters_that_cannot_be_adapted_are_refused(family, settings, facts, tmp_path):
    model = load_model(str(checkpoint_of(family, tmp_path)))
    with pytest.raises(TuneError, match=facts):
        add_adapters(model, LoRA(rank=4, target_modules=[], **settings))


def test_message_for_a_router_names_its_weight(tmp_path):
    model = load_model(str(checkpoint_of("mixtral", tmp_path)))
    with pytest.raises(TuneError, match=r"'router' .*adapter\.target_parameters=\[gate\.weight\]"):
        add_adapters(model, LoRA(rank=4, target_modules=["router"]))
