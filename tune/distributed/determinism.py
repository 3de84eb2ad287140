"""Deterministic kernels: repeated runs give the same bits."""

import os
import sys

import torch
from torch import Tensor


def use_deterministic_kernels() -> None:
    """Use deterministic kernels on a GPU. Training with the same seed, data, versions and devices then repeats bitwise,
    also from a checkpoint.

    Operations without a deterministic kernel raise RuntimeError. Training is slower, especially the backward of
    attention. Call this before the first operation on a GPU.

    Calls `torch.use_deterministic_algorithms(True)` and also covers what that leaves to the caller: cuBLAS's workspace,
    timing-based kernel selection in cuDNN and inductor, and NCCL's in-switch reductions. Environment variables that
    are already set are kept.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    if "torch._inductor.config" in sys.modules:  # it has already read the environment
        sys.modules["torch._inductor.config"].deterministic = True  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # never read


def cumsum(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Like `torch.cumsum`, but also works with `use_deterministic_kernels`: torch has no deterministic CUDA kernel for
    floating-point numbers."""
    is_exact = not (dtype or values.dtype).is_floating_point
    if is_exact or not values.is_cuda or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(dim, dtype=dtype)
    return _sums_by_doubling(values if dtype is None else values.to(dtype), dim)


def _sums_by_doubling(values: Tensor, dim: int) -> Tensor:
    """Compute prefix sums by doubling the number of summed elements in each pass (Hillis and Steele, 1986)."""
    sums, size, count = values, values.shape[dim], 1
    while count < size:
        before = sums.narrow(dim, 0, size - count)
        sums = torch.cat([sums.narrow(dim, 0, count), sums.narrow(dim, count, size - count) + before], dim=dim)
        count *= 2
    return sums
