"""Grouped matrix product, with a fallback where torch has no kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`rows` `[rows, in]` times `weight` `[groups, in, out]`: `[rows, out]`. Rows of group g end before `ends[g]`."""
    return F.grouped_mm(rows, weight, offs=ends) if _fits(rows, weight) else product_by_group(rows, weight, ends)


def _fits(rows: Tensor, weight: Tensor) -> bool:
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    if not aligned or not len(rows) or (torch.compiler.is_compiling() and rows.dtype != torch.bfloat16):
        return False
    if rows.is_cuda:
        return torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return rows.device.type == "cpu"


# A custom operator, as the sizes of groups depend on the data: torch.compile must not trace it.
@torch.library.custom_op("tune::product_by_group", mutates_args=())
def product_by_group(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


@torch.library.custom_op("tune::product_by_group_weight", mutates_args=())
def _weight_gradient(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    starts = ends[:-1].tolist()
    pairs = zip(rows.tensor_split(starts), gradient.tensor_split(starts), strict=True)
    return torch.stack([part.T @ its_gradient for part, its_gradient in pairs])


@product_by_group.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[2])


@_weight_gradient.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), rows.shape[1], gradient.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, ends = ctx.saved_tensors
    return product_by_group(gradient, weight.mT, ends), _weight_gradient(rows, gradient, ends), None


product_by_group.register_autograd(_backward, setup_context=_save)
