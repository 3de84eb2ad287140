"""Stacked experts: one parameter in memory, many tensors on disk."""

import json
from pathlib import Path

import pytest
import torch
from helpers import run_processes
from safetensors.torch import load_file, save_file
from stacked_experts import EXPERTS, Stacked
from torch.testing import assert_close

from tune.checkpointers import Pretrained
from tune.errors import TuneError


@pytest.fixture
def source(tmp_path):
    """Separate experts in two files."""
    torch.manual_seed(0)
    tensors = {f"layers.{i}.experts.{e}.weight": torch.randn(4, 4) for i in range(2) for e in range(EXPERTS)}
    tensors |= {f"layers.{i}.norm.weight": torch.randn(4) for i in range(2)}
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "made up", "torch_dtype": "float32"}))
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:3]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, folder / "b.safetensors")
    return folder, tensors


def plain_output(tensors):
    hidden = torch.arange(4.0)
    for i in range(2):
        normed = torch.nn.functional.rms_norm(hidden, (4,), tensors[f"layers.{i}.norm.weight"])
        hidden = hidden + sum(tensors[f"layers.{i}.experts.{e}.weight"] @ normed for e in range(EXPERTS))
    return hidden.sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])  # two ranks hold 2 experts and 1
def test_stacked_experts_round_trip(source, tmp_path, processes):
    folder, tensors = source
    script = Path(__file__).parents[1] / "stacked_experts.py"
    output = run_processes(script, processes, str(folder), str(tmp_path / "out"))
    assert float(output.split()[-1]) == pytest.approx(plain_output(tensors), rel=1e-5)
    assert_close(load_file(tmp_path / "out" / "model.safetensors"), tensors, rtol=0, atol=0)


def test_mismatched_expert_is_named(source):
    folder, _ = source
    tensors = load_file(folder / "a.safetensors")
    del tensors["layers.0.experts.1.weight"]
    save_file(tensors | {"layers.0.experts.2.weight": torch.zeros(4, 5)}, folder / "a.safetensors")
    with pytest.raises(TuneError) as error:
        Pretrained(str(folder), Stacked())
    assert "missing: layers.0.experts.1.weight [4, 4]" in str(error.value)
    assert "layers.0.experts.2.weight has shape [4, 5], config.json says [4, 4]" in str(error.value)
