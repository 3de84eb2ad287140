"""Dropout whose mask is a function of (seed, step, sample, position), so that it does not depend on the layout."""

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tune import fused, rehearsal
from tune.collators import Batch
from tune.distributed import own_part
from tune.peft import adapter_kernels

# Multipliers of 32-bit mixing functions with low bias (C. Wellons, hash-prospector), as signed integers.
FIRST, SECOND, THIRD = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32


class Mask(NamedTuple):
    """Dropout with `probability`, from random bits per row, `keys` `[rows]`, and per feature, `features` `[in]`."""

    probability: float
    keys: Tensor
    features: Tensor


def dropout(input: Tensor, probability: float, keys: Tensor, features: Tensor) -> Tensor:
    """Set elements of `input` `[..., dim]` to zero with `probability`, and scale up the others.

    `keys` `[...]` are random bits per token, `features` `[dim]` random bits per feature, which differ between layers.
    """
    if torch.compiler.is_compiling():
        return masked(input, probability, keys, features)
    return _Dropout.apply(input, probability, keys, features)


class _Dropout(torch.autograd.Function):
    """Dropout that does not store its mask: backward computes it again."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, probability: float, keys: Tensor, features: Tensor) -> Tensor:
        ctx.save_for_backward(keys, features)
        ctx.probability = probability
        return masked(input, probability, keys, features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return masked(gradient, ctx.probability, *ctx.saved_tensors), None, None, None


def masked(input: Tensor, probability: float, keys: Tensor, features: Tensor) -> Tensor:
    """`dropout` without its gradient."""
    if fused.fits(input):
        return adapter_kernels.masked(input, keys, features, _threshold(probability), 1 / (1 - probability))
    if rehearsal.is_of_shapes():
        return input / (1 - probability)
    return input * (mix(keys[..., None] ^ features) >= _threshold(probability)) / (1 - probability)


def add_masked_product(
    total: Tensor, left: Tensor, right: Tensor, probability: float, keys: Tensor, features: Tensor
) -> None:
    """Add left @ right, with the dropout of `masked`, to `total` `[rows, dim]` in place."""
    if fused.fits(total) and total.is_contiguous():
        scale = 1 / (1 - probability)
        adapter_kernels.add_masked_product(total, left, right, keys, features, _threshold(probability), scale)
    else:
        total.add_(masked(left @ right, probability, keys, features))


def prepare_dropout(layer: nn.Module, name: str, probability: float, width: int) -> None:
    """Set the dropout of the adapted layer `name`, whose inputs have `width` features."""
    layer.dropout, layer.dropout_keys = probability, None  # type: ignore[assignment]
    if probability:
        numbers = torch.arange(width, dtype=torch.int32, device="cpu")
        features = mix(mix(numbers) + _signed(zlib.crc32(name.encode())))
        layer.register_buffer("dropout_features", features, persistent=False)


def set_dropout_keys(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Give the adapters of `model` random bits for each token of the batch, before a forward.

    The bits depend on the step's seed, the token's sample and its position in it. If the batch is not part of a step
    (`Batch.in_step`), torch's generator draws the dropout instead.
    """
    batch = inputs[0] if inputs else None
    keys = None
    if isinstance(batch, Batch) and batch.step_seed is not None:
        part = own_part(model, batch)
        samples = part.documents.samples[part.documents.ids]
        keys = mix(mix(samples.int() + _signed(batch.step_seed)) ^ (part.positions.int() * THIRD))
    for module in model.modules():
        if hasattr(module, "dropout_keys"):
            module.dropout_keys = keys  # type: ignore[assignment]


def mix(bits: Tensor) -> Tensor:
    """Mix int32 bits: each output bit depends on all input bits."""
    bits = bits ^ (bits >> 16 & 0xFFFF)
    bits = bits * FIRST
    bits = bits ^ (bits >> 15 & 0x1FFFF)
    bits = bits * SECOND
    return bits ^ (bits >> 16 & 0xFFFF)


def _threshold(probability: float) -> int:
    """The signed 32-bit integer that the share `probability` of all 32-bit integers is below."""
    return _signed(round(probability * 2**32) - 2**31 + 2**32 & 0xFFFFFFFF)


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
