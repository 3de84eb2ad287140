"""Kernels of adapters for GPUs, in Triton: what plain operations would do in many passes over a layer's activations.

On other devices, without Triton and under `torch.compile`, which fuses by itself, the plain operations run.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS = 32, 128  # of a program
SHARE = 256  # rows that a program sums up


def fits(tensor: Tensor) -> bool:
    """Whether the kernels run on `tensor`."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return False
    return not (torch.compiler.is_compiling() or hasattr(tensor, "fake_mode")) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def masked(input: Tensor, keys: Tensor, features: Tensor, threshold: int, scale: float) -> Tensor:
    """`input` `[..., width]`, times `scale` where mix(keys ^ features) >= threshold and 0 elsewhere."""
    input = input.contiguous()
    output = torch.empty_like(input)
    rows, width = keys.numel(), len(features)
    tensors = input, keys.contiguous(), features, output
    launch("masked", _grid(rows, width), *tensors, rows, width, threshold, scale, ROWS, COLUMNS)
    return output


def add_masked_product(
    total: Tensor, narrow: Tensor, matrix: Tensor, keys: Tensor, features: Tensor, threshold: int, scale: float
) -> None:
    """Add `masked(narrow @ matrix)` to `total` `[rows, width]`, which is contiguous."""
    (rows, width), (rank, _) = total.shape, matrix.shape
    narrow = narrow if narrow.stride(1) == 1 else narrow.contiguous()
    tensors = total, narrow, matrix.contiguous(), keys.contiguous(), features
    sizes = rows, width, rank, narrow.stride(0)
    blocks = ROWS, COLUMNS, min(64, max(16, _power_of_two(rank)))
    launch("add_masked_product", _grid(rows, width), *tensors, *sizes, threshold, scale, *blocks)


def scaled_gradient(gradient: Tensor, output: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """`gradient` `[rows, width]` times `factors` `[width]`, and the sum of gradient * output over rows in fp32."""
    gradient, output, factors = gradient.contiguous(), output.contiguous(), factors.float().contiguous()
    rows, width = gradient.shape
    scaled = torch.empty_like(gradient)
    programs = -(-rows // SHARE)
    sums = torch.empty(programs, width, dtype=torch.float32, device=gradient.device)
    grid = -(-width // COLUMNS), programs
    launch("scaled_gradient", grid, gradient, output, factors, scaled, sums, rows, width, SHARE, ROWS, COLUMNS)
    return scaled, sums.sum(dim=0)


def squared_norms(weight: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """The sum of the squares of each row of `weight` `[rows, columns]` plus `scaling` times that of left * right
    `[rows, rank]`, in fp32."""
    tensors = weight.contiguous(), left.contiguous(), right.contiguous()
    squares = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    sizes = weight.shape[1], left.shape[1]
    launch("squared_norms", (len(weight), 1), *tensors, squares, *sizes, scaling, 1024, _power_of_two(sizes[1]))
    return squares


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _grid(rows: int, width: int) -> tuple[int, int]:
    return -(-width // COLUMNS), -(-rows // ROWS)


def launch(program: str, grid: tuple[int, int], *arguments: Any) -> None:
    """Run a program of `triton_programs`. Planning puts a cost in its place."""
    from tune.peft import triton_programs

    with torch.cuda.device_of(arguments[0]):
        getattr(triton_programs, program)[grid](*arguments)
