import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import save_checkpoint
from torch import nn

from tune import distributed, peft, quantization
from tune.models import build
from tune.run.hardware import peak_memory_gib, planned_memory


def test_peak_memory_matches_the_kernel():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("Linux only")
    (peak,) = (int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    assert peak_memory_gib(torch.device("cpu")) == pytest.approx(peak / 2**20, rel=0.05)


@pytest.mark.weekly
def test_peak_memory_excludes_the_parent_process():
    """On Linux, getrusage starts with the parent's peak."""
    held = b"x" * 2**30
    show = "import torch; from tune.run.hardware import peak_memory_gib as f; print(f(torch.device('cpu')))"
    shown = subprocess.run([sys.executable, "-c", show], check=True, capture_output=True, text=True).stdout
    assert 0.05 < float(shown) < len(held) / 2**30


def held(tensors) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize(
    ("dora", "master_dtype", "cpu_offload"), [(False, "fp32", False), (True, "bf16", False), (True, "fp32", True)]
)
def test_planned_memory_matches_held_memory(checkpoint, dora, master_dtype, cpu_offload):
    """QLoRA in two precisions: the plan on the meta device matches the memory of weights, gradients, and AdamW."""
    with torch.device("meta"):
        model = build(str(checkpoint))
    quantization.quantize_linears(model, double=True)
    peft.add_adapters(model, peft.LoRA(rank=4, dora=dora))
    planned = planned_memory(model, "bf16", master_dtype, shards=1)

    options = {"dtype": "bf16", "master_dtype": master_dtype, "cpu_offload": cpu_offload}
    distributed.parallelize(model, distributed.init("cpu"), **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        nn.init.zeros_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    assert planned["weights"] * 2**30 == held(model.parameters())
    assert planned["gradients"] * 2**30 == held(parameter.grad for parameter in trained)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert planned["optimizer"] * 2**30 == held(moments)


def test_tensor_parallel_processes_each_hold_unshareable_weights(tmp_path):
    folders = save_checkpoint(tmp_path / "even", vocab_size=300), save_checkpoint(tmp_path / "odd", vocab_size=301)
    with torch.device("meta"):
        even, odd = (build(str(folder)) for folder in folders)
    shared, whole = (planned_memory(model, "fp32", "fp32", 4, 2)["weights"] * 2**30 / 4 for model in (even, odd))
    width = even.config.hidden_size
    assert shared == sum(parameter.numel() for parameter in even.parameters()) / 4
    assert whole - shared == 2 * width * (301 / 2 - 300 / 4)  # embedding and head are sharded only over dp_shard=2
