"""Compute adapted linear layers in eager mode with as few operations and passes over activations as possible.

Sums are part of matrix products (`addmm_`), forward and backward. Layers with the same input are one autograd node,
since small models wait for the host. A compiler does all this by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tune import fused
from tune.peft import adapter_kernels
from tune.peft.dropout import Mask, add_masked_product, masked
from tune.quantization import dequantize


class AdaptedProduct(NamedTuple):
    """A layer with the output ratio * (input @ W.T + scaling * dropout(input) @ A.T @ B.T) + bias."""

    weight: tuple[Any, ...]  # W, or the tensors from which `_whole` computes it
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scaling: float
    mask: Mask | None  # of dropout
    magnitude: Tensor | None  # ratio is magnitude / norm(A, B), or 1 without a magnitude
    norm: Callable[[Tensor, Tensor], Tensor]


def outputs_of(layers: Sequence[AdaptedProduct], input: Tensor) -> tuple[Tensor, ...]:
    """The outputs of `layers` for one `input`; dropout applies to all or none of them. Weights, biases and norms are
    constants in backward."""
    trained = [tensor for layer in layers for tensor in (layer.a, layer.b, layer.magnitude)]
    return _Outputs.apply(input, layers, *trained)


def is_watched() -> bool:
    """Whether a dispatch mode observes operations. Selective checkpointing does, and keeps results, which then must not
    change in place."""
    return is_in_torch_dispatch_mode(include_infra_modes=False)


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, layers: Sequence[AdaptedProduct], *_: Tensor | None) -> tuple[Tensor, ...]:
        rows, dtype = input.reshape(-1, input.shape[-1]), input.dtype
        ranks = [len(layer.a) for layer in layers]
        a = (layers[0].a if len(layers) == 1 else torch.cat([layer.a for layer in layers])).to(dtype)
        all_a = _parts(a, ranks, dim=0)
        if layers[0].mask is None:
            low_rank = F.linear(rows, a)
            products = _parts(low_rank, ranks, dim=1)
        else:
            low_rank = rows.new_empty(len(rows), len(a))
            products = _parts(low_rank, ranks, dim=1)
            for mask, its_a, product in zip([layer.mask for layer in layers], all_a, products, strict=True):
                torch.mm(masked(rows, *cast(Mask, mask)), its_a.T, out=product)
        saved, outputs = [input, low_rank, a], []
        for layer, its_a, product in zip(layers, all_a, products, strict=True):
            b, magnitude = layer.b.to(dtype), layer.magnitude
            output = F.linear(input, _whole(layer.weight, dtype), layer.bias if magnitude is None else None)
            output.view(-1, output.shape[-1]).addmm_(product, b.T, alpha=layer.scaling)
            saved += [b, *layer.weight, *(layer.mask[1:] if layer.mask else ())]
            if magnitude is not None:
                ratio = magnitude.float() / layer.norm(its_a, b)
                saved += [output.mul_(ratio), ratio, magnitude]  # later operations mostly keep the output, too
                output = output if layer.bias is None else output + layer.bias
            outputs.append(output)
        ctx.save_for_backward(*saved)
        ctx.layers = [
            (layer.scaling, layer.mask and layer.mask.probability, len(layer.weight), layer.magnitude is not None)
            for layer in layers
        ]
        ctx.ranks = ranks
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, low_rank, a, *saved = ctx.saved_tensors
        rows, of_low_rank, total = input.reshape(-1, input.shape[-1]), torch.empty_like(low_rank), None
        parts = [_parts(low_rank, ctx.ranks, dim=1), _parts(of_low_rank, ctx.ranks, dim=1)]
        of_trained, all_of_a, masks, taken = [], [], [], iter(saved)
        for (scaling, probability, length, is_scaled), gradient, product, of_product in zip(
            ctx.layers, gradients, *parts, strict=True
        ):
            gradient, of_magnitude = gradient.reshape(-1, gradient.shape[-1]), None
            b, weight = next(taken), [next(taken) for _ in range(length)]
            if probability:
                masks.append(Mask(probability, next(taken), next(taken)))
            if is_scaled:
                gradient, of_magnitude = _scaled(gradient, *(next(taken) for _ in range(3)))
            of_product.addmm_(gradient, b, beta=0, alpha=scaling)
            of_b = torch.empty_like(b).addmm_(gradient.T, product, beta=0, alpha=scaling)
            of_trained.append([of_b, of_magnitude])
            if ctx.needs_input_grad[0]:
                whole = _whole(weight, gradient.dtype)
                total = gradient @ whole if total is None else total.addmm_(gradient, whole)
        if masks:
            for mask, its_a, of_product in zip(masks, _parts(a, ctx.ranks, dim=0), parts[1], strict=True):
                all_of_a.append(of_product.T @ masked(rows, *mask))
                if total is not None:
                    add_masked_product(total, of_product, its_a, *mask)
        else:
            all_of_a += _parts(of_low_rank.T @ rows, ctx.ranks, dim=0)
            if total is not None:
                total.addmm_(of_low_rank, a)
        of_input = None if total is None else total.view(input.shape)
        return (
            of_input,
            None,
            *(each for pair in zip(all_of_a, of_trained, strict=True) for each in (pair[0], *pair[1])),
        )


def _parts(joined: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    return [joined] if len(sizes) == 1 else joined.split(sizes, dim)


def _whole(weight: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """The weight matrix; an NF4 weight is dequantized at each use."""
    if len(weight) == 1:
        return weight[0]
    codes, scales, ranges, pairs = weight
    return dequantize(codes, scales, ranges, dtype, pairs)


def _scaled(gradient: Tensor, output: Tensor, ratio: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the unscaled product, of which `output` `[..., out]` is `ratio` times, and of `magnitude`."""
    output = output.reshape(gradient.shape)
    if fused.fits(gradient):
        of_product, sums = adapter_kernels.scaled_gradient(gradient, output, ratio)
    else:
        of_product = torch.mul(gradient, ratio, out=torch.empty_like(gradient))
        sums = torch.linalg.vecdot(gradient.float(), output.float(), dim=0)
    return of_product, sums / magnitude
