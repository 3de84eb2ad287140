"""Kernels that give the same bits when they are run again."""

import os
import sys

import torch
from torch import Tensor


def use_deterministic_kernels() -> None:
    """Have torch take kernels on a GPU that give the same bits when they are run again: a training with the same seed,
    data and versions on the same devices then repeats bitwise, also from a checkpoint. What has no such kernel raises
    RuntimeError. It is slower, most of all attention's backward. Call it before the first operation on a GPU.

    It is `torch.use_deterministic_algorithms(True)`, with what that leaves to its callers: cuBLAS's workspace, cuDNN's
    and inductor's choice of kernels by time, and NCCL's sums inside of switches. Variables of the environment that are
    set already stay as they are.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    if "torch._inductor.config" in sys.modules:  # which has read the environment
        sys.modules["torch._inductor.config"].deterministic = True  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it


def cumsum(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.cumsum`, also with `use_deterministic_kernels`: of floating-point numbers, torch has no such kernel."""
    is_exact = not (dtype or values.dtype).is_floating_point
    if is_exact or not values.is_cuda or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(dim, dtype=dtype)
    return _sums_by_doubling(values if dtype is None else values.to(dtype), dim)


def _sums_by_doubling(values: Tensor, dim: int) -> Tensor:
    """Each time, the sums of so many numbers become those of twice as many (Hillis and Steele, 1986)."""
    sums, size, count = values, values.shape[dim], 1
    while count < size:
        before = sums.narrow(dim, 0, size - count)
        sums = torch.cat([sums.narrow(dim, 0, count), sums.narrow(dim, count, size - count) + before], dim=dim)
        count *= 2
    return sums
