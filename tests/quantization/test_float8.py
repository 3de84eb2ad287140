"""Emulated float8 products match torchao layer by layer, and training learns like in full precision."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tune import config, quantization
from tune.checkpointers import load_model
from tune.peft import LoRA, adapted_modules, add_adapters

torchao = pytest.importorskip("torchao.float8")
CPU = torch.device("cpu")


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("lora", [False, True])
def test_each_layer_matches_torchao(scaling: str, lora: bool) -> None:
    torch.manual_seed(0)
    layer, theirs = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
    theirs.load_state_dict(layer.state_dict())
    recipe = torchao.Float8LinearConfig.from_recipe_name(scaling)
    settings = torchao.Float8LinearConfig(**{**vars(recipe), "emulate": True})
    theirs = torchao.convert_to_float8_training(torch.nn.Sequential(theirs), config=settings)
    model: Any = torch.nn.Sequential(torch.nn.Sequential(layer))
    quantization.compute_in_float8(model, scaling, CPU)
    if lora:
        add_adapters(model, LoRA(rank=4))
    mine = torch.randn(2, 32, 64, requires_grad=True)
    other = mine.detach().clone().requires_grad_()
    output, expected = model(mine), theirs(other)
    assert_close(output, expected, rtol=0, atol=0)  # B of the adapter is zero
    assert not torch.allclose(output, layer(mine), rtol=1e-3)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert mine.grad is not None
    assert_close(mine.grad, other.grad, rtol=0, atol=0)
    weights = model[0][0].weight
    if lora:
        (adapter,) = adapted_modules(model).values()
        assert weights.grad is None and adapter.lora_b.grad.abs().max() > 0
    else:
        assert_close(weights.grad, theirs[0].weight.grad, rtol=0, atol=0)


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", ["full_finetune", pytest.param("lora_finetune", marks=pytest.mark.slow)])
def test_float8_learns_like_full_precision(recipe: str, checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    losses = {}
    for scaling in ("null", "rowwise", "tensorwise"):
        settings = [
            f"model.path={checkpoint}", f"dataset.path={chats}", f"output_dir={tmp_path / scaling}", "max_seq_len=128",
            "device=cpu", "compute.dtype=fp32", "global_batch_size=4", "max_steps=8", "optimizer.lr=3e-3",
            "schedule.warmup=0", f"model.float8={scaling}",
        ]  # fmt: skip
        importlib.import_module(recipe).main(config.load(recipe, settings))
        lines = (tmp_path / scaling / "metrics.jsonl").read_text().splitlines()
        losses[scaling] = torch.tensor([json.loads(line)["loss"] for line in lines])
    exact = losses.pop("null")
    for rounded in losses.values():
        assert_close(rounded, exact, rtol=0.02, atol=0)
        assert not torch.equal(rounded, exact)
    made = "model" if recipe == "full_finetune" else "adapter"
    assert (tmp_path / "rowwise" / made / f"{made}.safetensors".replace("adapter.", "adapter_model.")).exists()
    assert not torch.equal(losses["rowwise"], losses["tensorwise"])


def test_sampling_uses_float8_too(checkpoint: Path) -> None:
    """Validation and sampling use the same products as training."""
    model = load_model(str(checkpoint))
    exact = model(torch.arange(32)[None])
    quantization.compute_in_float8(model, "rowwise", CPU)
    with torch.no_grad():
        assert 1e-4 < (model(torch.arange(32)[None]) - exact).abs().max() < 0.1 * exact.abs().max()
