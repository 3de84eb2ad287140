"""The products of adapted linear layers, with as few passes over a layer's inputs and outputs as eager mode allows.

What is added is added by a matrix product (`addmm_`), forward and backward. A compiler fuses by itself: it gets the
plain operations.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tune import fused
from tune.peft import kernels
from tune.peft.dropout import add_masked_product, dropout, masked


class Mask(NamedTuple):
    """Dropout with `probability`, by random bits of each row, `keys` `[rows]`, and of each feature, `[in]`."""

    probability: float
    keys: Tensor
    features: Tensor


def chained_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, mask: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """`rows` `[rows, in]` for the next product with them, and this one: `[rows, out]`, of `rows` with dropout by
    `mask`. Along a chain of products the gradient of `rows` is summed in place; what reads the last `rows` must not
    keep their gradient."""
    if torch.compiler.is_compiling():
        return rows, F.linear(rows if mask is None else dropout(rows, *mask), weight, bias)
    return _ChainedLinear.apply(rows, weight, bias, mask)


def add_product(output: Tensor, low_rank: Tensor, b: Tensor, scaling: float) -> Tensor:
    """`output` + scaling * low_rank @ b.T, in place where possible: `output` is not used otherwise."""
    if torch.compiler.is_compiling() or must_stay(output):
        return torch.addmm(output, low_rank * scaling, b.T)
    return _AddProduct.apply(output, low_rank, b, scaling)


def scale_columns(output: Tensor, factors: Tensor) -> Tensor:
    """`output` `[rows, out]` times `factors` `[out]`, in the type of `output`, and in place where possible."""
    if torch.compiler.is_compiling() or must_stay(output):
        return (output * factors).to(output.dtype)
    return _ScaleColumns.apply(output, factors)


class _ChainedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, mask: Mask | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.probability = mask and mask.probability
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, *(mask[1:] if mask else ()))
        return rows, F.linear(rows if mask is None else masked(rows, *mask), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_rows: Tensor | None, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, *bits = ctx.saved_tensors
        mask = Mask(ctx.probability, *bits) if bits else None
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_weight = gradient.T @ (rows if mask is None else masked(rows, *mask)) if needs_weight else None
        of_bias = gradient.sum(dim=0) if needs_bias else None
        if not needs_rows:
            of_rows = None
        elif of_rows is None:
            of_rows = gradient @ weight
            of_rows = of_rows if mask is None else masked(of_rows, *mask)
        elif mask is None:
            of_rows = of_rows.addmm_(gradient, weight)
        else:
            add_masked_product(of_rows, gradient, weight, *mask)
        return of_rows, of_weight, of_bias, None


class _AddProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, low_rank: Tensor, b: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(low_rank, b)
        ctx.scaling = scaling
        ctx.mark_dirty(output)
        return output.addmm_(low_rank, b.T, alpha=scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        low_rank, b = ctx.saved_tensors
        _, needs_low_rank, needs_b, _ = ctx.needs_input_grad
        of_low_rank = _product(gradient, b, ctx.scaling) if needs_low_rank else None
        of_b = _product(gradient.T, low_rank, ctx.scaling) if needs_b else None
        return gradient, of_low_rank, of_b, None


class _ScaleColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, factors: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        output.mul_(factors)
        ctx.save_for_backward(output, factors)  # the result: what follows mostly keeps it too
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        scaled, factors = ctx.saved_tensors
        if fused.fits(gradient):
            of_output, sums = kernels.scaled_gradient(gradient, scaled, factors)
        else:
            of_output = torch.mul(gradient, factors, out=torch.empty_like(gradient))
            sums = torch.linalg.vecdot(gradient.float(), scaled.float(), dim=0)
        return of_output, sums / factors


def _product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """scaling * left @ right, in one kernel."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scaling)


def must_stay(output: Tensor) -> bool:
    """Whether `output` must not be changed in place: it is a part of another tensor, or a mode that sees operations is
    on. Selective checkpointing is one, which keeps results."""
    return output._is_view() or is_in_torch_dispatch_mode(include_infra_modes=False)
