"""Triton kernels for adapters, which replace many passes over a layer's activations.

Plain operations run where `tune.fused.fits` is false.
"""

import torch
from torch import Tensor

from tune import fused

PROGRAMS = "tune.peft.adapter_programs"
ROWS, COLUMNS = 32, 128  # per program
SHARE = 256  # rows that a program sums


def masked(input: Tensor, keys: Tensor, features: Tensor, threshold: int, scale: float) -> Tensor:
    """`input` `[..., width]`, times `scale` where mix(keys ^ features) >= threshold and 0 elsewhere."""
    input = input.contiguous()
    output = torch.empty_like(input)
    rows, width = keys.numel(), len(features)
    tensors = input, keys.contiguous(), features, output
    fused.launch(PROGRAMS, "masked", _grid(rows, width), *tensors, rows, width, threshold, scale, ROWS, COLUMNS)
    return output


def add_masked_product(
    total: Tensor, narrow: Tensor, matrix: Tensor, keys: Tensor, features: Tensor, threshold: int, scale: float
) -> None:
    """Add `masked(narrow @ matrix)` to the contiguous `total` `[rows, width]`, in place."""
    (rows, width), (rank, _) = total.shape, matrix.shape
    narrow = narrow if narrow.stride(1) == 1 else narrow.contiguous()
    tensors = total, narrow, matrix.contiguous(), keys.contiguous(), features
    sizes = rows, width, rank, narrow.stride(0)
    blocks = ROWS, COLUMNS, min(64, max(16, _power_of_two(rank)))
    fused.launch(PROGRAMS, "add_masked_product", _grid(rows, width), *tensors, *sizes, threshold, scale, *blocks)


def scaled_gradient(gradient: Tensor, output: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """`gradient` `[rows, width]` times `factors` `[width]`, and the sum of gradient * output over rows in fp32."""
    gradient, output, factors = gradient.contiguous(), output.contiguous(), factors.float().contiguous()
    rows, width = gradient.shape
    scaled = torch.empty_like(gradient)
    programs = -(-rows // SHARE)
    sums = torch.empty(programs, width, dtype=torch.float32, device=gradient.device)
    grid = -(-width // COLUMNS), programs
    tensors, sizes = (gradient, output, factors, scaled, sums), (rows, width, SHARE, ROWS, COLUMNS)
    fused.launch(PROGRAMS, "scaled_gradient", grid, *tensors, *sizes)
    return scaled, sums.sum(dim=0)


def squared_norms(weight: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """For each row, the sum of squares of `weight` `[rows, columns]` plus `scaling` times the sum of left * right
    `[rows, rank]`, in fp32."""
    tensors = weight.contiguous(), left.contiguous(), right.contiguous()
    squares = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    columns, rank = weight.shape[1], left.shape[1]
    sizes = columns, rank, scaling, 1024, _power_of_two(rank)
    fused.launch(PROGRAMS, "squared_norms", (len(weight), 1), *tensors, squares, *sizes)
    return squares


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _grid(rows: int, width: int) -> tuple[int, int]:
    return -(-width // COLUMNS), -(-rows // ROWS)
