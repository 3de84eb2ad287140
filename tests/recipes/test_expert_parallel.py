"""One loss curve, also where each process has some of the experts (expert parallelism)."""

import pytest
import torch
from helpers import save_checkpoint
from models.test_families import SMALL, VARIANTS
from recipes.test_tensor_parallel import LORA, assert_one_curve, common  # noqa: F401
from safetensors.torch import load_file

EIGHT = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3")
LAYOUTS = {
    "ep": ["parallel.ep=4", "micro_batch_size=2"],
    "ep x FSDP": ["parallel.ep=2", "micro_batch_size=2"],
    "ep x HSDP": ["parallel.ep=2", "parallel.dp_replicate=2", "micro_batch_size=1"],
}
ADAPTER = [*LORA, "adapter.target_modules='.*(q_proj|experts.*)'"]


def of_family(name, folder, **others):
    pytest.importorskip("transformers")
    kind, changes = VARIANTS[name]
    counts = {field: count for field, count in EIGHT.items() if field in changes}
    save_checkpoint(folder / name, kind, **SMALL | changes | counts | others | {"vocab_size": 300})
    return f"model.path={folder / name}"


def test_two_processes_have_the_experts(common, tmp_path):  # noqa: F811
    model = of_family("qwen3_moe", tmp_path)
    variants = {"all": [model, "model.router_loss=0.1"]}
    layouts = {"ep": ["parallel.ep=2", "micro_batch_size=2"]}
    assert_one_curve("full_finetune", common, variants, layouts, 2, tmp_path)
    merged, alone = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("all, ep", "alone/all"))
    torch.testing.assert_close(merged, alone, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_families(common, tmp_path):  # noqa: F811
    variants = {name: [of_family(name, tmp_path)] for name in FAMILIES}
    assert_one_curve("full_finetune", common, variants, LAYOUTS, 4, tmp_path / "runs")


@pytest.mark.slow
def test_ways(common, tmp_path):  # noqa: F811
    model = of_family("qwen3_moe", tmp_path)
    variants = {
        "plain": ["packed=false"],
        "from random weights": ["from_scratch=true"],
        "recomputed": ["memory.activation_checkpointing=full"],
        "partly recomputed": ["memory.activation_checkpointing=selective"],
        "on the host": ["memory.cpu_offload=true"],
        "in backward": ["optimizer_in_backward=true", "max_grad_norm=null"],
        "Adafactor": ["optimizer._component_=tune.optimizers.Adafactor"],
        "Muon": ["optimizer._component_=tune.optimizers.Muon"],
    }
    variants = {name: [model, "model.router_loss=0.1", *settings] for name, settings in variants.items()}
    layouts = {name: LAYOUTS[name] for name in ("ep x FSDP",)}
    assert_one_curve("full_finetune", common, variants, layouts, 4, tmp_path / "runs")


@pytest.mark.slow
def test_adapters(common, tmp_path):  # noqa: F811
    model, biased = of_family("qwen3_moe", tmp_path, head_dim=16), of_family("gpt_oss", tmp_path)
    variants = {
        "LoRA": [model, *ADAPTER],
        "LoRA on transposed experts": [biased, *ADAPTER],
        "NF4": [model, *LORA, "quantization.weights=nf4"],
        "DoRA": [model, *LORA, "adapter.dora=true"],
    }
    layouts = {name: LAYOUTS[name] for name in ("ep", "ep x FSDP")}
    assert_one_curve("lora_finetune", common, variants, layouts, 4, tmp_path / "runs")
