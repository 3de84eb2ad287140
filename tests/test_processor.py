"""Realistic machines with a GPU that torch does not see. `nvidia-smi` is a script that prints the output of the real
one."""

import sys
from pathlib import Path

import pytest
import torch

from tune import distributed, processor
from tune.errors import TuneError

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Return a function of a driver version (None: no `nvidia-smi`) that fakes a GPU that torch does not see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(processor, "PROC", tmp_path / "proc")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def machine(driver: str | None, cuda: str | None = "13.0", code: int = 0) -> Path:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        if driver is not None:
            command = tmp_path / "nvidia-smi"
            command.write_text(f"#!/bin/sh\necho '{H100}, {driver}'\nexit {code}\n")
            command.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path

    return machine


def error(device: str = "auto") -> str:
    with pytest.raises(TuneError) as raised:
        distributed.join(device)
    assert str(raised.value).startswith("device: ")
    return str(raised.value)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_driver_too_old_for_cuda(device, gpu):
    gpu("535.104.05")
    message = error(device)
    assert all(fact in message for fact in (H100, "535.104.05", "CUDA 13.0", "580.65", "CUDA 12", "device=cpu"))


@pytest.mark.parametrize(
    ("driver", "fix"), [("580.82.07", "pip install --force-reinstall torch=="), ("535.1", "CUDA 12")]
)
def test_torch_without_cuda(driver, fix, gpu, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    gpu(driver, cuda=None)
    message = error()
    assert "without CUDA" in message and fix in message and "+cpu" not in message.partition("pip")[2]


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus(value, gpu, monkeypatch):
    gpu("580.82.07")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert "Unset CUDA_VISIBLE_DEVICES" in error() and repr(value) in error()


def test_gpu_that_torch_cannot_use_for_another_reason(gpu, monkeypatch):
    def fails():
        raise RuntimeError("system not yet initialized\nmore")

    gpu("580.82.07")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(torch.cuda, "init", fails)
    message = error()
    assert "system not yet initialized." in message and "'7'" in message and "--gpus all" in message


def test_container_without_access_to_the_gpu(gpu):
    """It has neither `nvidia-smi` nor devices, but it sees the kernel module."""
    folder = gpu(None) / "proc"
    (folder / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (folder / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05\n")
    assert "470.57.02" in error()


@pytest.mark.parametrize("driver", [None, "580.82.07"])
def test_machine_without_a_gpu_uses_the_cpu(driver, gpu):
    """Also a machine with driver tools that find no GPU."""
    gpu(driver, code=9)
    assert processor.device_type("auto") == "cpu"


def test_cpu_can_be_selected(gpu):
    gpu("535.104.05")
    assert distributed.join("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_75", "sm_80", "sm_90", "sm_100", "compute_120"], (7, 0), False),
        (["sm_75", "sm_80", "sm_90"], (8, 9), True),
        (["sm_75", "sm_86"], (8, 0), False),
        (["sm_80", "sm_90a"], (12, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        ([], (7, 0), True),
    ],
)
def test_gpu_without_kernels(built, capability, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    if runs:
        return processor.require_kernels(torch.device("cuda", 0))
    with pytest.raises(TuneError, match=rf"device: Tesla V100.* {capability[0]}\.{capability[1]}, but .*pytorch\.org"):
        processor.require_kernels(torch.device("cuda", 0))


@pytest.mark.parametrize(("rank", "count", "index"), [(0, 2, 0), (1, 2, 1), (2, 2, None), (3, 1, 0), (0, 0, None)])
def test_process_has_the_capability_of_its_own_gpu(rank, count, index, monkeypatch):
    """The capability of the only visible GPU, if the launcher assigns one; none with fewer GPUs than processes."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that monkeypatch undoes what is set
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at: (8 + at, 0))
    assert processor.capability("cuda") == (None if index is None else (8 + index, 0))
    assert processor.capability("cpu") is None
