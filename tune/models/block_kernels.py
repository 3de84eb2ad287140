"""Triton kernels for GPUs: chains of elementwise operations in one pass, and products of groups of rows.

The kernels round where the plain operations round, so that a GPU computes the same with and without them. Plain
operations run where `tune.fused.fits` is false; a compiler fuses them itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tune import fused

PROGRAMS = "tune.models.block_programs"
HEADS = 4  # heads of a token that are rotated together
BLOCK = 1024  # elements per program
ROUNDED = {"enable_fp_fusion": False}  # round a product before an addition


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs (i, i + size / 2) of `query` `[batch, seq, heads, size]` and `key` `[batch, seq, kv_heads, size]`
    by the angles of `cos` and `sin` `[batch, seq, 1, size]`, which contain each angle twice."""
    if not fused.fits(query) or query.shape[-1] != cos.shape[-1] or query.shape[-1] not in (32, 64, 128, 256):
        return rotated(query, cos, sin), rotated(key, cos, sin)
    return _Rotate.apply(query, key, cos, sin)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The plain operations of `rotate`."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for tensors of the same shape. Only these two are saved for backward."""
    return _SiluProduct.apply(gate, up) if fused.fits(gate) else F.silu(gate) * up


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _launch_rotation(query, key, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *_launch_rotation(query, key, cos, sin, back=True), None, None


def _launch_rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
    query, key, cos, sin = query.contiguous(), key.contiguous(), cos.contiguous(), sin.contiguous()
    outputs = torch.empty_like(query), torch.empty_like(key)
    heads, kv_heads, size = query.shape[2], key.shape[2], query.shape[3]
    groups = -(-heads // HEADS), -(-kv_heads // HEADS)
    grid, tensors = (cos.shape[0] * cos.shape[1], sum(groups)), (query, key, *outputs, cos, sin)
    sizes = heads, kv_heads, groups[0], size // 2, HEADS
    fused.launch(PROGRAMS, "rotation", grid, *tensors, *sizes, back, **ROUNDED)
    return outputs


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gate, up = gate.contiguous(), up.contiguous()
        output = torch.empty_like(gate)
        grid, count = (-(-gate.numel() // BLOCK),), gate.numel()
        fused.launch(PROGRAMS, "silu_product", grid, gate, up, output, count, BLOCK, **ROUNDED)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.contiguous() for tensor in ctx.saved_tensors)
        gradient = gradient.contiguous()
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        grid, tensors = (-(-gate.numel() // BLOCK),), (gradient, gate, up, of_gate, of_up)
        fused.launch(PROGRAMS, "silu_product_gradient", grid, *tensors, gate.numel(), BLOCK, **ROUNDED)
        return of_gate, of_up


def has_products(rows: Tensor) -> bool:
    """Whether `grouped_product` runs on the device of `rows`, in their dtype."""
    return fused.fits(rows) and (bool(torch.version.hip) or torch.cuda.get_device_capability(rows.device) >= (8, 0))


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`tune.models.moe.grouped_product` of any sizes, for all groups at once, without waiting for the device."""
    (count, inputs), (groups, _, outputs) = rows.shape, weight.shape
    output = rows.new_empty(count, outputs)
    if not count:
        return output
    blocks = _blocks(rows, count // groups, outputs, inputs)
    # Each group has at most one block that is not full.
    grid = min(count, count // blocks["ROWS"] + groups) * -(-outputs // blocks["COLUMNS"])
    tensors = rows.contiguous(), weight, output, ends
    sizes = groups, *weight.stride(), inputs, outputs, power_of_two(groups)
    fused.launch(PROGRAMS, "grouped_product", (grid,), *tensors, *sizes, **blocks)
    return output


def grouped_product_weight(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """The gradient of `weight` in `grouped_product`, `[groups, in, out]`, from that of the output."""
    (count, inputs), outputs, groups = rows.shape, gradient.shape[1], len(ends)
    output = rows.new_empty(groups, inputs, outputs)
    blocks = _blocks(rows, inputs, outputs, count // groups)
    blocks["LINES"] = blocks.pop("ROWS")
    grid = groups * -(-inputs // blocks["LINES"]) * -(-outputs // blocks["COLUMNS"])
    tensors = rows.contiguous(), gradient.contiguous(), output, ends
    fused.launch(PROGRAMS, "grouped_product_weight", (grid,), *tensors, inputs, outputs, **blocks)
    return output


def _blocks(rows: Tensor, lines: int, columns: int, depth: int) -> dict[str, Any]:
    """The block sizes and launch options of programs for a product `[lines, depth]` x `[depth, columns]`."""
    is_wide = rows.itemsize == 4  # no tensor cores, unless TF32 is allowed
    most = 64 if is_wide else 128
    lines, columns = (min(most, max(16, power_of_two(size))) for size in (lines, columns))
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {
        "ROWS": lines,
        "COLUMNS": columns,
        "DEPTH": min(32 if is_wide else 64, max(16, power_of_two(depth))),
        "PRECISION": precision,
        "num_warps": 8 if lines * columns > 64 * 64 else 4,
        "num_stages": 3,  # with these block sizes, fits the shared memory of GPUs of 8.6 and later
    }


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()
