"""Rotary position embedding (Su et al., 2021) with the frequency scalings that published checkpoints use.

The layout is Hugging Face's: the two halves of a head form the rotated pairs, so weights load without permutation.
Frequencies match `transformers.modeling_rope_utils`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tune.errors import TuneError


@dataclass(frozen=True)
class RopeConfig:
    """`scaling` holds the fields of config.json's `rope_scaling` (or `rope_parameters`) that belong to `kind`."""

    head_dim: int
    max_positions: int
    theta: float = 10000.0
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict)


class Rope:
    """Rotation angles as (cos, sin) of `[batch, seq, 1, head_dim]`. Not a module: it has no weights and no buffers."""

    def __init__(self, config: RopeConfig):
        if config.kind not in SCALINGS:
            raise TuneError(
                f"config.json: rope type '{config.kind}' is not supported; supported: {', '.join(SCALINGS)}"
            )
        self.config = config
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if positions.device not in self._frequencies:
            # Angles are computed on the CPU so that every device trains with the same bits.
            frequencies, magnitude = SCALINGS[self.config.kind](self.config)
            self._frequencies[positions.device] = frequencies.to(positions.device), magnitude
        frequencies, magnitude = self._frequencies[positions.device]
        angles = positions[..., None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `[batch, seq, heads, head_dim]` by the angles of its positions."""
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _plain(config: RopeConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return 1.0 / config.theta**exponents


def _default(config: RopeConfig) -> tuple[Tensor, float]:
    return _plain(config), 1.0


def _linear(config: RopeConfig) -> tuple[Tensor, float]:
    return _plain(config) / config.scaling["factor"], 1.0


def _llama3(config: RopeConfig) -> tuple[Tensor, float]:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated (Llama 3.1)."""
    scaling, frequencies = config.scaling, _plain(config)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling["factor"] + keep * frequencies, 1.0


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): interpolation by wavelength, and a magnitude that makes up for longer contexts."""
    scaling, frequencies = config.scaling, _plain(config)
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config.max_positions / original

    def dimension(turns: float) -> float:
        return config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (torch.arange(config.head_dim // 2).float() - low) / (high - low or 0.001)
    interpolate = ramp.clamp(0, 1)

    def magnitude(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        scales = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = magnitude(scales[0]) / magnitude(scales[1]) if scales[0] and scales[1] else magnitude()
    return interpolate * frequencies / factor + (1 - interpolate) * frequencies, attention_factor


# `dynamic` NTK scaling equals `default` up to the trained length. Beyond it the angles would depend on the longest row
# of the batch, and the loss on how rows are batched: the decoder refuses such rows.
SCALINGS: dict[str, Callable[[RopeConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
