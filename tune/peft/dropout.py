"""Dropout whose mask is a function of (seed, step, sample, position), so that no layout of the training changes it."""

import zlib

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


def set_dropout_keys(model: nn.Module, seed: int, step: int, batch: Batch) -> None:
    """Give the adapters of `model` random bits for the forward of `batch`, which must be on its device. The bits of a
    token depend on its sample and its position there."""
    layers = [module for module in model.modules() if getattr(module, "dropout", 0) and hasattr(module, "dropout_keys")]
    if layers:
        batch = getattr(model, "part", lambda batch: batch)(batch)  # that this process computes
        start = _signed(zlib.crc32(f"{seed} {step}".encode()))
        samples = batch.documents.samples[batch.documents.ids]
        keys = mix(mix(samples.int() + start) ^ (batch.positions.int() * THIRD))
        for layer in layers:
            layer.dropout_keys = keys


def mix(bits: Tensor) -> Tensor:
    """int32 to int32, each output bit depending on all input bits."""
    bits = bits ^ (bits >> 16 & 0xFFFF)
    bits = bits * FIRST
    bits = bits ^ (bits >> 15 & 0x1FFFF)
    bits = bits * SECOND
    return bits ^ (bits >> 16 & 0xFFFF)


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
