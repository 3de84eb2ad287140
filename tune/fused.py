"""Launch kernels written in Triton, where they can run.

Each kernel replaces a chain of plain operations, which run on other devices, without Triton, and under `torch.compile`,
which fuses them itself. Packages with kernels keep the programs in a module of their own, which is
imported at the first launch.
"""

import functools
import importlib
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor

from tune.devices import triton_lacks


def fits(tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether kernels can run on `tensor`, or convert it to `dtype`. Planning replaces the answer for another GPU."""
    dtype = dtype or tensor.dtype
    if not tensor.is_cuda or dtype == torch.float64:
        return False
    if dtype == torch.bfloat16 and not (torch.version.hip or torch.cuda.get_device_capability(tensor.device) >= (8, 0)):
        return False  # Triton does not support bf16 there
    return not (torch.compiler.is_compiling() or hasattr(tensor, "fake_mode")) and _has_triton()


def launch(programs: str, name: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a program of the module `programs` on the device of the first argument. Planning only counts its bytes."""
    program = getattr(importlib.import_module(programs), name)
    with torch.cuda.device(arguments[0].device):
        program[grid](*arguments, **options)


@functools.cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if lacks := triton_lacks():
        warnings.warn(
            f"using slower plain operations instead of fused kernels: Triton needs {lacks}. "
            "Install gcc and python3-dev (python3-devel on some distributions)",
            stacklevel=2,
        )
    return not lacks
