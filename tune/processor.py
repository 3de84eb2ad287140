"""The device of a process: its type and capability, and why torch does not see a GPU that is there."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from packaging.version import Version

from tune.errors import TuneError

OLDEST_DRIVERS = {11: "450.80", 12: "525.60", 13: "580.65"}
"""By the major version of CUDA the NVIDIA driver that it needs, by its release notes."""
SELECTOR = "the selector at pytorch.org (Get Started) gives the command"
HIDES_ALL = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES
PROC = Path("/proc/driver/nvidia")
ALLOCATOR_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}


def device_type(device: str) -> str:
    """The type of device that the setting `device` stands for on this machine.

    Raises:
        TuneError: there is no such device; or for "auto" torch sees no GPU where the machine has one of NVIDIA: a run
            on the CPU would be a hundred times slower. The message says what to do.
    """
    found = present()
    if device in ("auto", "cuda") and found == ["cpu"] and (reason := why_no_cuda()):
        raise TuneError(f"device: {reason}. Or set device=cpu")
    if device not in ("auto", *found):
        raise TuneError(f"device: {device} is not available on this machine; available: {', '.join(found)}")
    return found[0] if device == "auto" else device


def present() -> list[str]:
    """The types of device that torch can use here, the fastest first."""
    is_present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [kind for kind, is_here in is_present.items() if is_here]


def count_processes() -> int:
    """The processes of this run, as the launcher describes them."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)


def use_expandable_segments() -> None:
    """Have torch's allocator grow its segments, unless the environment says otherwise. Call it before the first use of
    a GPU, when torch reads the environment."""
    if not ALLOCATOR_SETTINGS & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def capability(kind: str) -> tuple[int, int] | None:
    """The compute capability of this process's GPU; None for another type of device, or where there is no such GPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
    index = 0 if torch.cuda.device_count() == 1 else local_rank
    if kind != "cuda" or index >= torch.cuda.device_count():
        return None
    use_expandable_segments()
    return torch.cuda.get_device_capability(index)


def why_no_cuda() -> str:
    """Why torch does not see the NVIDIA GPU of this machine, and what to do; "" if the machine has none."""
    if (gpu := _nvidia_gpu()) is None:
        return ""
    name, driver = gpu
    has = f"this machine has a GPU ({name}{driver and f', driver {driver}'})"
    built = torch.version.cuda
    if built is None:
        return f"{has}, and torch {torch.__version__} is built without CUDA. {_install(driver)}"
    oldest = OLDEST_DRIVERS.get(int(built.partition(".")[0]))
    if driver and oldest and _numbers(driver) < _numbers(oldest):
        return (
            f"{has}, and torch {torch.__version__} is built for CUDA {built}, which needs driver {oldest} or newer. "
            f"Update the driver, or install torch built for CUDA 12: {SELECTOR}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in HIDES_ALL:
        return f"{has}, and CUDA_VISIBLE_DEVICES={visible!r} hides it from this process: unset CUDA_VISIBLE_DEVICES"
    try:
        torch.cuda.init()
        reason = "torch.cuda.is_available() is false"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
    note = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    return (
        f"{has}, and torch {torch.__version__} cannot use it{note}: {reason}. Check what `nvidia-smi` prints here; a "
        "container needs `--gpus all`, a job of SLURM `--gpus-per-node`"
    )


def _install(driver: str) -> str:
    """How to get a torch for this driver. That of PyPI is built for CUDA 13, and on Windows without CUDA."""
    has_wheel = sys.platform == "linux" and platform.machine() == "x86_64"
    if has_wheel and driver and _numbers(driver) >= _numbers(OLDEST_DRIVERS[13]):
        return f"Run `pip install --force-reinstall torch=={Version(torch.__version__).public}`"
    return f"Install torch built for CUDA 12: {SELECTOR}"


def _nvidia_gpu() -> tuple[str, str] | None:
    """Name and driver ("" if unknown) of this machine's NVIDIA GPU, found without torch; None if there is none."""
    if command := shutil.which("nvidia-smi"):
        query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            output = ""
        name, _, driver = output.strip().partition("\n")[0].rpartition(",")
        if name:
            return name.strip(), driver.strip() if _numbers(driver) else ""
    if not any((PROC / "gpus").glob("*")):
        return None
    text = (PROC / "version").read_text(encoding="utf-8") if (PROC / "version").is_file() else ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return "of NVIDIA", found[0] if found else ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def require_kernels(device: torch.device) -> None:
    """Raise TuneError if torch is built without kernels for this GPU: the first one would end the run. Those for a
    compute capability also run on later ones of the same major version; code for a virtual architecture on all later
    ones."""
    if torch.version.hip:
        return
    capability = torch.cuda.get_device_capability(device)
    built = [(name, _capability(name)) for name in torch.cuda.get_arch_list()]
    runs = [each for name, each in built if name.startswith("compute_") or each[0] == capability[0]]
    if built and not any(each <= capability for each in runs):
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted({each for _, each in built}))
        raise TuneError(
            f"device: {torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and "
            f"torch {torch.__version__} is built for {known}. Install one that is built for this GPU (of CUDA 12 for "
            f"GPUs before Turing, of 12.8 or newer for Blackwell): {SELECTOR}. Or set device=cpu"
        )


def _capability(architecture: str) -> tuple[int, int]:
    """sm_90a -> (9, 0)"""
    digits = re.sub(r"\D", "", architecture.partition("_")[2])
    return int(digits[:-1]), int(digits[-1])
