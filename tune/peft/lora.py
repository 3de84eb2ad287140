"""LoRA (Hu et al., 2021), rsLoRA (Kalajdzievski, 2023) and DoRA (Liu et al., 2024), computed as PEFT computes them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.peft.dropout import dropout
from tune.quantization import NF4Weight
from tune.types import Fraction, PositiveFloat, PositiveInt

T = TypeVar("T")


@dataclass(frozen=True)
class LoRA:
    """Which linear layers get an adapter, and of what kind.

    `target_modules` is `all-linear` (all but the head), a list of names, or a regular expression that must match a
    layer's whole name. Names may be ours (`query`) or the checkpoint's (`q_proj`). The patterns give other ranks and
    alphas to the layers whose name ends with, or is matched by, a key.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Fraction = 0.0
    target_modules: list[str] | str = "all-linear"
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_stabilized: bool = False  # scale by alpha / sqrt(rank) and not alpha / rank
    dora: bool = False  # learn the magnitude of the weight's rows apart from their direction

    def at(self, *names: str) -> tuple[int, float]:
        """Rank and alpha of the layer of these names, looked up in the patterns as PEFT does."""
        return _by_pattern(self.rank_pattern, names, self.rank), _by_pattern(self.alpha_pattern, names, self.alpha)

    def scaling(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


class LoRALinear(nn.Linear):
    """A linear layer whose weight W is used as W + scaling * B @ A, or with `magnitude`, as that scaled to row norms m.

    `lora_a` is `[rank, in_features]`, `lora_b` `[out_features, rank]`. Made from a linear layer in place: the layer
    keeps its name, its weight and its place in the model.
    """

    weight: nn.Parameter | NF4Weight  # type: ignore[assignment]
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter | None
    rank: int
    alpha: float
    scaling: float
    dropout: float
    dropout_keys: Tensor | None
    name: str

    @classmethod
    def adapt(cls, linear: nn.Linear, name: str, rank: int, alpha: float, lora: LoRA) -> None:
        linear.__class__ = cls
        assert isinstance(linear, LoRALinear)
        if isinstance(linear.weight, NF4Weight):
            device, dtype = linear.weight.codes.device, torch.float32
        else:
            device, dtype = linear.weight.device, linear.weight.dtype
        linear.lora_a = nn.Parameter(torch.empty(rank, linear.in_features, device=device, dtype=dtype))
        linear.lora_b = nn.Parameter(torch.empty(linear.out_features, rank, device=device, dtype=dtype))
        linear.magnitude = None
        if lora.dora:
            linear.magnitude = nn.Parameter(torch.empty(linear.out_features, device=device, dtype=dtype))
        linear.rank, linear.alpha = rank, alpha
        linear.scaling, linear.dropout = lora.scaling(rank, alpha), lora.dropout
        linear.name, linear.dropout_keys = name, None

    def forward(self, input: Tensor) -> Tensor:
        base = self._base(input)
        dropped = input
        if self.dropout and self.training:
            assert self.dropout_keys is not None, "set_dropout_keys must come before a forward in training"
            keys = self.dropout_keys.view(input.shape[:-1])  # some models flatten rows before their linear layers
            dropped = dropout(input, self.dropout, keys, self.name)
        low_rank = F.linear(F.linear(dropped, self.lora_a), self.lora_b) * self.scaling
        if self.magnitude is None:
            return base + low_rank
        # The norm counts as a constant in backward (section 4.3 of the paper).
        with torch.no_grad():
            norm = (self._base_weight() + self.scaling * self.lora_b @ self.lora_a).norm(dim=1)
        ratio = self.magnitude / norm
        if dropped is input:
            direction = base if self.bias is None else base - self.bias
        else:
            direction = self._base(dropped) if self.bias is None else self._base(dropped) - self.bias
        return base + (ratio - 1) * direction + ratio * low_rank

    def _base(self, input: Tensor) -> Tensor:
        if not isinstance(self.weight, NF4Weight):
            return F.linear(input, self.weight, self.bias)
        return self.weight.linear(input) if self.bias is None else self.weight.linear(input) + self.bias

    def _base_weight(self) -> Tensor:
        return self.weight.dequantize(self.lora_a.dtype) if isinstance(self.weight, NF4Weight) else self.weight


def _by_pattern(patterns: Mapping[str, T], names: tuple[str, ...], default: T) -> T:
    for pattern, value in patterns.items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
            return value
    return default
