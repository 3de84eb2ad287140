"""Dropout whose mask is a function of (seed, step, sample, position), so that no layout of the training changes it."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from tune.collators import Batch

# Multipliers of 32-bit mixing functions with low bias (C. Wellons, hash-prospector); as signed numbers.
FIRST, SECOND, THIRD = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32


def dropout(input: Tensor, probability: float, keys: Tensor, layer_seed: Tensor, first: int = 0) -> Tensor:
    """Set elements of `input` `[..., dim]` to zero with `probability` and scale up the others.

    `keys` `[...]` are random bits of each token; `layer_seed`, one number, gives each layer its own mask. `first` is
    the number of the first feature, where `input` has a share of them.
    """
    # Not multiplied first: the compiler would compute a multiple of an index in C++, where it must not overflow.
    features = mix(torch.arange(first, first + input.shape[-1], dtype=torch.int32, device=input.device))
    bits = mix(keys[..., None] ^ mix(features + layer_seed))
    keep = bits >= _signed(round(probability * 2**32) - 2**31 + 2**32 & 0xFFFFFFFF)
    return input * keep / (1 - probability)


def prepare_dropout(layer: nn.Module, name: str, probability: float) -> None:
    """Set the dropout of the adapted `layer` called `name`. Its seed is a buffer, since torch.compile would make a
    graph for each value of a plain number."""
    layer.dropout, layer.dropout_keys = probability, None  # type: ignore[assignment]
    seed = torch.tensor(_signed(zlib.crc32(name.encode())), dtype=torch.int32, device="cpu")
    layer.register_buffer("layer_seed", seed, persistent=False)


def set_dropout_keys(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Before a forward of `model`: give its adapters random bits for each token of the batch, which depend on the
    step's seed, the token's sample and its position there. Without a batch in a step (`Batch.in_step`) they have
    none, and torch's generator draws the dropout."""
    batch = inputs[0] if inputs else None
    keys = None
    if isinstance(batch, Batch) and batch.step_seed is not None:
        batch = getattr(model, "part", lambda batch: batch)(batch)  # that this process computes
        samples = batch.documents.samples[batch.documents.ids]
        keys = mix(mix(samples.int() + _signed(batch.step_seed)) ^ (batch.positions.int() * THIRD))
    for module in model.modules():
        if hasattr(module, "dropout_keys"):
            module.dropout_keys = keys  # type: ignore[assignment]


def mix(bits: Tensor) -> Tensor:
    """int32 to int32, each output bit depending on all input bits."""
    bits = bits ^ (bits >> 16 & 0xFFFF)
    bits = bits * FIRST
    bits = bits ^ (bits >> 15 & 0x1FFFF)
    bits = bits * SECOND
    return bits ^ (bits >> 16 & 0xFFFF)


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
