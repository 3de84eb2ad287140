"""Fused kernels for GPUs, in Triton: elementwise chains of a block in one pass each, forward and backward.

They round where the plain operations round, so that a GPU computes the same with and without them. A compiler fuses
these chains by itself: where `tune.fused` does not fit, the plain operations run.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tune import fused

PROGRAMS = "tune.models.triton_programs"
HEADS = 4  # of a token, rotated together
BLOCK = 1024  # elements of a program


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs (i, i + size / 2) of `query` `[batch, seq, heads, size]` and `key` `[batch, seq, kv_heads, size]`
    by the angles of `cos` and `sin` `[batch, seq, 1, size]`, which hold each angle twice."""
    if not fused.fits(query) or query.shape[-1] != cos.shape[-1] or query.shape[-1] not in (32, 64, 128, 256):
        return rotated(query, cos, sin), rotated(key, cos, sin)
    return _Rotate.apply(query, key, cos, sin)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The plain operations of `rotate`."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of tensors of one shape. Only these two are kept for backward."""
    return _SiluProduct.apply(gate, up) if fused.fits(gate) else F.silu(gate) * up


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _launch_rotation(query, key, cos, sin)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *_launch_rotation(query, key, cos, sin, back=True), None, None


def _launch_rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
    query, key, cos, sin = query.contiguous(), key.contiguous(), cos.contiguous(), sin.contiguous()
    outputs = torch.empty_like(query), torch.empty_like(key)
    heads, kv_heads, size = query.shape[2], key.shape[2], query.shape[3]
    groups = -(-heads // HEADS), -(-kv_heads // HEADS)
    tensors = query, key, *outputs, cos, sin
    fused.launch(
        PROGRAMS,
        "rotation",
        (cos.shape[0] * cos.shape[1], sum(groups)),
        *tensors,
        heads,
        kv_heads,
        groups[0],
        size // 2,
        HEADS,
        back,
    )
    return outputs


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gate, up = gate.contiguous(), up.contiguous()
        output = torch.empty_like(gate)
        fused.launch(PROGRAMS, "silu_product", (-(-gate.numel() // BLOCK),), gate, up, output, gate.numel(), BLOCK)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.contiguous() for tensor in ctx.saved_tensors)
        gradient = gradient.contiguous()
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        tensors = gradient, gate, up, of_gate, of_up
        fused.launch(PROGRAMS, "silu_product_gradient", (-(-gate.numel() // BLOCK),), *tensors, gate.numel(), BLOCK)
        return of_gate, of_up
