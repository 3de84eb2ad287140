"""The loss curve is the same when processes shard transformers models and a custom module by their plans."""

import json
import shutil

import full_finetune
import pytest
import torch
from helpers import figures_of, run_processes, save_checkpoint
from planned_module import PLAN, build
from recipes.test_tensor_parallel import LAYOUTS, LORA, RUN_VARIANTS, assert_one_curve, common  # noqa: F401
from safetensors.torch import load_file, save_file

from tune import config

pytest.importorskip("transformers")

# Norms per head; three norms around sublayers; joined projections with gathered outputs; biases in a joined projection;
# experts; norms of all heads; latents.
FAMILIES = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 4}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "neox": ("GPTNeoXConfig", {"tie_word_embeddings": False}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_key_value_heads": 4}),
    "olmo2": ("Olmo2Config", {}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}
OWN = ["model._component_=planned_module.build", f"parallel.plan={json.dumps(PLAN)}"]


@pytest.fixture(scope="module")
def own(checkpoint, tmp_path_factory):
    """A folder with weights and a tokenizer for the custom module."""
    folder = tmp_path_factory.mktemp("own")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(checkpoint / file, folder / file)
    torch.manual_seed(0)
    save_file(build(str(folder)).state_dict(), folder / "model.safetensors")
    return folder


def families(folder):
    return {
        name: ["model._component_=tune.models.hf", f"model.path={save_checkpoint(folder / name, kind, **changes)}"]
        for name, (kind, changes) in FAMILIES.items()
    }


def assert_same_export(folder, name, layout, file="model/model.safetensors"):
    exported, alone = (load_file(folder / run / file) for run in (f"{name}, {layout}", f"alone/{name}"))
    assert exported.keys() == alone.keys()
    for key, tensor in alone.items():
        torch.testing.assert_close(exported[key], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.weekly
def test_families(own, common, tmp_path):  # noqa: F811
    variants = families(tmp_path / "models") | {"own": [*OWN, f"model.path={own}"]}
    names = {name: ["tp", "tp x FSDP"] if name in ("qwen3", "own") else ["tp x FSDP"] for name in variants}
    assert_one_curve("full_finetune", common, variants, LAYOUTS, 4, tmp_path, names)
    for name, layouts in names.items():
        for layout in layouts:
            assert_same_export(tmp_path, name, layout)


@pytest.mark.weekly
def test_adapters(own, common, tmp_path):  # noqa: F811
    """Adapt joined projections, biases and latents; the other families differ in norms, which adapters leave alone."""
    own_lora = [*OWN, f"model.path={own}", *LORA]
    of_family = families(tmp_path / "models")
    variants = {name: [*of_family[name], *LORA] for name in ("phi3", "neox", "deepseek_v2")}
    variants |= {"own": own_lora, "own, DoRA": [*own_lora, "adapter.dora=true"]}
    assert_one_curve(
        "lora_finetune", common, variants, LAYOUTS, 4, tmp_path, {name: ["tp x FSDP"] for name in variants}
    )
    for name in variants:
        assert_same_export(tmp_path, name, "tp x FSDP", "adapter/adapter_model.safetensors")


@pytest.mark.slow
def test_resume_without_the_plan(own, common, tmp_path):  # noqa: F811
    """Train two steps on two processes, and two more on one."""
    settings = ["schedule._component_=tune.optimizers.constant", "schedule.warmup=0", "dataset.validation=null"]
    common = [*common, "max_steps=4", *OWN, f"model.path={own}", *settings]
    full_finetune.main(config.load("full_finetune", [*common, f"output_dir={tmp_path / 'alone'}"]))
    first = json.dumps({"moved": ["parallel.tp=2", "max_steps=2"]})
    run_processes(RUN_VARIANTS, 2, "full_finetune", str(tmp_path), json.dumps(common), first)
    full_finetune.main(config.load("full_finetune", [*common, f"output_dir={tmp_path / 'moved'}"]))
    assert figures_of(tmp_path / "moved") == pytest.approx(figures_of(tmp_path / "alone"), rel=1e-5)
