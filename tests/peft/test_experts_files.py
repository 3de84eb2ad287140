"""Adapters of experts in PEFT files: PEFT loads them for all experts at once, vLLM one by one. If the experts are one
tensor on disk, the file has one matrix for all of them."""

import json
import re
from pathlib import Path

import lora_finetune
import pytest
import torch
from helpers import run_processes, save_checkpoint
from models.test_families import VARIANTS
from safetensors import safe_open
from torch.testing import assert_close

from tune import config, distributed
from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.models import build
from tune.peft import LoRA, adapter, add_adapters, export_adapter, load_adapter, merge, read_adapter
from tune.tokenizers import Tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RUN_VARIANTS = Path(__file__).parents[1] / "recipes" / "run_variants.py"
TOKENS = torch.arange(5, 85).view(2, 40)
SETTINGS = {
    "mixtral": {"target_modules": ["q_proj", "w1", "w2", "w3"]},
    "qwen3_moe": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "deepseek_v3": {"target_modules": r".*(o_proj|experts\.\d+\.\w+_proj)"},
    "gpt_oss": {"target_modules": ["q_proj", "gate_up_proj", "experts.down"], "rank_pattern": {"down_proj": 2}},
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def checkpoint_of(family, folder):
    config_class, changes = VARIANTS[family]
    return save_checkpoint(folder, config_class, **{"pad_token_id": None} | changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", SETTINGS)
def test_expert_adapters_in_peft_and_merged(family, tmp_path):
    folder = checkpoint_of(family, tmp_path / "base")
    model, lora = load_model(str(folder)), LoRA(rank=4, alpha=12, dropout=0.1, **SETTINGS[family])
    before = model(TOKENS)
    add_adapters(model, lora)
    assert_close(model(TOKENS), before, atol=1e-6, rtol=1e-6)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    logits = model(TOKENS)
    assert (logits - before).abs().max() > 1e-2
    world, adapter = distributed.init("cpu"), tmp_path / "adapter"
    export_adapter(model, adapter, world=world, base=str(folder), tokenizer=Tokenizer(str(folder)))
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as tensors:
        kind = ".experts.base_layer.lora_A.weight" if family == "gpt_oss" else ".experts.1."
        assert any(kind in name for name in tensors.keys())  # noqa: SIM118

    again = load_model(str(folder))
    add_adapters(again, read_adapter(str(adapter)))
    load_adapter(again, str(adapter))
    assert_close(again(TOKENS), logits, atol=1e-5, rtol=1e-5)
    merge(folder, adapter, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert_close(merged(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    assert_close(theirs(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "granitemoe"])
def test_table_shows_layers_left_out_and_how_to_adapt_them(family, tmp_path):
    folder = checkpoint_of(family, tmp_path / "base")

    def add(**settings):
        with torch.device("meta"):
            return add_adapters(build(str(folder)), LoRA(rank=2, **settings))

    by_default = add()
    linears = {name for name in by_default.left_out if ".experts." in name}
    table = by_default.table()
    assert linears and "mlp.experts.down  " in table
    if family == "granitemoe":
        assert re.search(r"Experts cannot be adapted: \S+input_linear has another name", table)
        return
    named = add(target_modules=re.search(r"'adapter\.target_modules=(.*)'", table)[1])
    assert named.layers.keys() == by_default.layers.keys() | linears
    assert "left out" not in named.table()
    assert "Experts cannot be adapted" in add(dora=True).table()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "target_parameters": BOTH[::-1]},
        {"target_parameters": BOTH, "rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"target_modules": r".*\.[qv]_proj", "target_parameters": BOTH, "use_rslora": True},
        {"target_modules": [], "target_parameters": ["0.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]},
    ],
    ids=["list", "parameters alone", "pattern", "others in each layer"],
)  # fmt: skip
def test_expert_adapters_made_by_peft(settings, tmp_path):
    folder = checkpoint_of("gpt_oss", tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    theirs.save_pretrained(tmp_path / "adapter")
    logits = theirs(TOKENS).logits

    model = load_model(str(folder))
    assert (model(TOKENS) - logits).abs().max() > 1e-2
    add_adapters(model, read_adapter(str(tmp_path / "adapter")))
    load_adapter(model, str(tmp_path / "adapter"))
    assert_close(model(TOKENS), logits, atol=1e-5, rtol=1e-5)
    merge(folder, tmp_path / "adapter", tmp_path / "merged")
    assert_close(load_model(str(tmp_path / "merged"))(TOKENS), logits, atol=1e-5, rtol=1e-5)


def test_settings_of_experts_may_be_repeated_for_their_adapter(tmp_path):
    """Experts that are one tensor are modules in the settings, and parameters in the file."""
    folder, targets = checkpoint_of("gpt_oss", tmp_path / "base"), ["down_proj", "gate_up_proj"]
    model = load_model(str(folder))
    add_adapters(model, LoRA(rank=4, target_modules=targets))
    export_adapter(model, tmp_path / "adapter", world=distributed.init("cpu"), base=str(folder))
    assert adapter(str(tmp_path / "adapter"), rank=4, target_modules=targets).rank == 4
    with pytest.raises(TuneError, match=r"Remove target_modules=\['down_proj'\]"):
        adapter(str(tmp_path / "adapter"), target_modules=["down_proj"])


@pytest.mark.parametrize("changes", [{"num_local_experts": 8}, {"num_hidden_layers": 4}], ids=str)
def test_stacked_experts_of_another_base_are_not_merged(changes, tmp_path):
    """Eight experts at rank 2 would have matrices of the same shapes as four at rank 4."""
    folder = checkpoint_of("gpt_oss", tmp_path / "base")
    model, lora = load_model(str(folder)), LoRA(rank=4, target_modules=["down_proj"])
    add_adapters(model, lora)
    tokenizer = Tokenizer(str(folder))
    export_adapter(model, tmp_path / "adapter", world=distributed.init("cpu"), base=str(folder), tokenizer=tokenizer)
    other = save_checkpoint(tmp_path / "other", "GptOssConfig", **VARIANTS["gpt_oss"][1] | changes)
    with pytest.raises(TuneError, match="is for another model:"):
        merge(other, tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mixtral", {"target_modules": ["w1"]}, "PEFT adapts gate and up together; include up"),
        (
            "mixtral",
            {"target_modules": ["w1", "w2", "w3"], "dora": True},
            "of experts, which dora=true does not",
        ),
        ("mixtral", {"target_modules": ["w1", "w2", "w3"], "rank_pattern": {"w2": 2}}, "must have adapter.rank"),
        ("deepseek_v3", {"target_modules": ["gate_proj", "up_proj"]}, "has the name of an expert's projection"),
        ("mixtral", {"modules_to_save": ["w2"]}, "modules_to_save: blocks.0.mlp.experts.down are experts, which PEFT"),
        ("gpt_oss", {"target_modules": ["gate_up_proj"], "dora": True}, "of experts, which dora=true does not"),
        ("gpt_oss", {"target_modules": ["down_proj"], "init": "pissa"}, "of experts, which init=pissa does not"),
        ("gpt_oss", {"target_modules": ["down_proj_bias"]}, "matches no layer. Did you mean 'down_proj'"),
        ("granitemoe", {"target_modules": ["input_linear"]}, "has another name in transformers, "),
    ],
)
def test_unsupported_adapters_are_refused(family, settings, message, tmp_path):
    model = load_model(str(checkpoint_of(family, tmp_path)))
    with pytest.raises(TuneError, match=message):
        add_adapters(model, LoRA(rank=4, **settings))


@pytest.mark.weekly
@pytest.mark.parametrize(("family", "targets"), [("mixtral", "[w1,w2,w3]"), ("gpt_oss", "[down_proj,gate_up_proj]")])
def test_two_processes_train_expert_adapters_like_one(family, targets, chats, tmp_path):
    """Dropout masks follow the tokens to their experts, and each process reads its own part of an adapter."""
    folder = checkpoint_of(family, tmp_path / "base")
    common = [
        f"model.path={folder}", f"dataset.path={chats}", "max_seq_len=128", "global_batch_size=8", "compute.dtype=fp32",
        "device=cpu", "optimizer.lr=5e-3", "max_steps=5", "epochs=12", "adapter.rank=4", "checkpointer.every=null",
        f"adapter.target_modules={targets}", "adapter.dropout=0.2",
    ]  # fmt: skip
    variants = {"new": [], "continued": [f"adapter.path={tmp_path / 'new' / 'adapter'}"]}
    for name, settings in variants.items():
        lora_finetune.main(config.load("lora_finetune", [*common, *settings, f"output_dir={tmp_path / name}"]))
    together = json.dumps({f"{name} by two": settings for name, settings in variants.items()})
    run_processes(RUN_VARIANTS, 2, "lora_finetune", str(tmp_path), json.dumps(common), together)
    losses = {
        run.parent.name: [json.loads(line)["loss"] for line in run.open()] for run in tmp_path.glob("*/metrics.jsonl")
    }
    for name in variants:
        assert losses[f"{name} by two"] == pytest.approx(losses[name], rel=1e-5)
    assert losses["new"][-1] < losses["new"][0] - 0.05
    assert losses["continued"][-1] < losses["new"][-1]
