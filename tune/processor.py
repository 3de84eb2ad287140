"""The device of a process: its type and compute capability, and why torch does not see an installed GPU."""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from packaging.version import Version

from tune.devices import DEVICES, Device, named
from tune.errors import TuneError

OLDEST_DRIVERS = {11: "450.80", 12: "525.60", 13: "580.65"}
"""Major version of CUDA -> oldest NVIDIA driver, from CUDA's release notes."""
SELECTOR = "the selector at pytorch.org (Get Started) gives the command"
HIDES_ALL = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES
PROC = Path("/proc/driver/nvidia")
ALLOCATOR_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}


def device_type(device: str) -> str:
    """The device type for the setting `device` on this machine.

    Raises:
        TuneError: there is no such device. Also for "auto" on a machine with an NVIDIA GPU that torch does not see,
            since a run on the CPU would be a hundred times slower. The message says what to do.
    """
    found = present()
    if device in ("auto", "cuda") and found == ["cpu"] and (reason := why_no_cuda()):
        raise TuneError(f"device: {reason}. Or set device=cpu")
    if device not in ("auto", *found):
        raise TuneError(
            f"device: {device} is not available on this machine; available: {', '.join(found)}. Leave device out"
        )
    return found[0] if device == "auto" else device


def present() -> list[str]:
    """The device types that torch can use here, fastest first."""
    is_present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [kind for kind, is_here in is_present.items() if is_here]


def count_processes() -> int:
    """The number of processes of this run, from the launcher's environment variables."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)


def use_expandable_segments() -> None:
    """Make torch's allocator use expandable segments, unless the environment configures the allocator.

    Call it before the first use of a GPU, when torch reads the environment.
    """
    if not ALLOCATOR_SETTINGS & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def capability(kind: str) -> tuple[int, int] | None:
    """The compute capability of this process's GPU; None for another device type, or if there is no such GPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
    index = 0 if torch.cuda.device_count() == 1 else local_rank
    if kind != "cuda" or index >= torch.cuda.device_count():
        return None
    use_expandable_segments()
    return torch.cuda.get_device_capability(index)


def described(here: torch.device) -> Device:
    """Return the description of this process's device, with its memory. Processes of a node share host memory.

    Raises TuneError for an unknown device.
    """
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / beside / 2**30
    if here.type == "cpu":
        return replace(DEVICES["cpu"], memory=host, host_memory=host, per_node=beside, cores=os.cpu_count() or 1)
    name = torch.cuda.get_device_name(here) if here.type == "cuda" else here.type
    if (known := named(name)) is None:
        raise TuneError(
            f"the speed of {name} is unknown (known: {', '.join(DEVICES)}). Describe the device in a FILE, and set the "
            "layout that `tune plan --search --device FILE` finds"
        )
    memory = torch.cuda.get_device_properties(here).total_memory / 2**30
    return replace(known, memory=memory, host_memory=host, per_node=beside)


def why_no_cuda() -> str:
    """Why torch does not see the NVIDIA GPU of this machine, and what to do; "" if the machine has none."""
    if (gpu := _nvidia_gpu()) is None:
        return ""
    name, driver = gpu
    has = f"this machine has a GPU ({name}{driver and f', driver {driver}'})"
    built = torch.version.cuda
    if built is None:
        return f"{has}, but torch {torch.__version__} is built without CUDA. {_install(driver)}"
    oldest = OLDEST_DRIVERS.get(int(built.partition(".")[0]))
    if driver and oldest and _numbers(driver) < _numbers(oldest):
        return (
            f"{has}, but torch {torch.__version__} is built for CUDA {built}, which needs driver {oldest} or newer. "
            f"Update the driver, or install torch built for CUDA 12: {SELECTOR}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in HIDES_ALL:
        return f"{has}, but CUDA_VISIBLE_DEVICES={visible!r} hides it from this process. Unset CUDA_VISIBLE_DEVICES"
    try:
        torch.cuda.init()
        reason = "torch.cuda.is_available() is false"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
    note = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    return (
        f"{has}, but torch {torch.__version__} cannot use it{note}: {reason}. Check the output of `nvidia-smi`; "
        "containers need `--gpus all`, SLURM jobs `--gpus-per-node`"
    )


def _install(driver: str) -> str:
    """How to install torch for this driver. The wheels on PyPI are built for CUDA 13, on Windows without CUDA."""
    has_wheel = sys.platform == "linux" and platform.machine() == "x86_64"
    if has_wheel and driver and _numbers(driver) >= _numbers(OLDEST_DRIVERS[13]):
        return f"Run `pip install --force-reinstall torch=={Version(torch.__version__).public}`"
    return f"Install torch built for CUDA 12: {SELECTOR}"


def _nvidia_gpu() -> tuple[str, str] | None:
    """The name and driver ("" if unknown) of this machine's NVIDIA GPU, found without torch; None if there is none."""
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
    """Raise TuneError if torch is built without kernels for this GPU, where the first kernel would fail.

    Kernels for a compute capability also run on later ones of the same major version; code for a virtual architecture
    (PTX) runs on all later ones.
    """
    if torch.version.hip:
        return
    capability = torch.cuda.get_device_capability(device)
    built = [(name, _capability(name)) for name in torch.cuda.get_arch_list()]
    runs = [each for name, each in built if name.startswith("compute_") or each[0] == capability[0]]
    if built and not any(each <= capability for each in runs):
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted({each for _, each in built}))
        raise TuneError(
            f"device: {torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, but "
            f"torch {torch.__version__} is built for {known}. Install torch built for this GPU (with CUDA 12 for GPUs "
            f"before Turing, 12.8 or newer for Blackwell): {SELECTOR}. Or set device=cpu"
        )


def _capability(architecture: str) -> tuple[int, int]:
    """sm_90a -> (9, 0)"""
    digits = re.sub(r"\D", "", architecture.partition("_")[2])
    return int(digits[:-1]), int(digits[-1])
