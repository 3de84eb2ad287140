"""Rotary position embeddings (Su et al., 2021) with the frequency scalings of published checkpoints.

Frequencies match `transformers.modeling_rope_utils`. Pairs are laid out as in the checkpoint, so that weights load
without permutation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tune.collators import Documents
from tune.errors import TuneError
from tune.models import block_kernels


@dataclass(frozen=True)
class RopeConfig:
    """Rotation of the first `size` dimensions of a head.

    Pairs are dimensions i and i + size / 2, as in Hugging Face's Llama, or 2i and 2i + 1 if `interleaved`. `scaling`
    has the fields of config.json's `rope_scaling` (or `rope_parameters`) for `kind`. Queries are multiplied by
    1 + `query_growth` * log(1 + position // original_max_position_embeddings).
    """

    size: int
    max_positions: int
    theta: float = 10000.0
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict, hash=False)
    interleaved: bool = False
    query_growth: float = 0.0

    @property
    def trained_length(self) -> int:
        """The number of positions that the model was trained for, from its config."""
        stretched = self.scaling.get("original_max_position_embeddings", 0) * (self.scaling.get("factor") or 1)
        return max(self.max_positions, int(stretched))

    @property
    def cached_length(self) -> int:
        """The number of tokens up to which the rotation of a token does not depend on later tokens."""
        if self.kind == "longrope":
            return self.scaling["original_max_position_embeddings"]
        return self.max_positions if self.kind == "dynamic" else self.trained_length


class Rotation(NamedTuple):
    """Cosines and sines `[batch, seq, 1, size]`, and the factor for queries `[batch, seq, 1, 1]`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    query_scale: Tensor | None


class Rope:
    """Computes rotations from positions. Not a module, since it has no weights or buffers."""

    def __init__(self, config: RopeConfig):
        if config.kind not in SCALINGS:
            raise TuneError(f"config.json: rope type '{config.kind}' is not one of {', '.join(SCALINGS)}")
        self.config = config
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def __call__(self, positions: Tensor, documents: Documents | None, dtype: torch.dtype) -> Rotation:
        """The rotation of tokens at `positions` `[batch, seq]`. Raises TuneError if it would depend on the rest of the
        batch."""
        if positions.device not in self._frequencies:
            # Computed on the CPU, so that the bits are the same for every device.
            frequencies, magnitude = SCALINGS[self.config.kind](self.config)
            self._frequencies[positions.device] = frequencies.to(positions.device), magnitude
        frequencies, magnitude = self._frequencies[positions.device]
        longest = positions.shape[1] if documents is None else max(documents.whole.lengths)
        if self.config.kind == "dynamic" and longest > self.config.max_positions:
            raise TuneError(
                f"max_seq_len: a document has {longest} tokens, more than the {self.config.max_positions} that this "
                "model was trained for. With its 'dynamic' rope scaling, the loss would depend on the rest of the "
                "batch. Lower max_seq_len, or set rope_scaling in config.json to 'linear' or 'yarn'."
            )
        if self.config.kind == "longrope" and documents is None:  # short or long factors, by the length of the document
            frequencies = frequencies[int(longest > self._original)]
        elif self.config.kind == "longrope" and documents is not None:
            frequencies = frequencies[(documents.whole.boundaries.diff()[documents.ids] > self._original).long()]
        angles = positions[..., None].float() * frequencies
        doubled = angles.repeat_interleave(2, dim=-1) if self.config.interleaved else torch.cat([angles] * 2, dim=-1)
        angles = doubled[:, :, None]
        cos, sin = (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)
        query_scale = None
        if self.config.query_growth:
            growth = self.config.query_growth * torch.log1p((positions // self._original).float())
            query_scale = (1 + growth)[..., None, None].to(dtype)
        return Rotation(cos, sin, self.config.interleaved, query_scale)

    @property
    def _original(self) -> int:
        return self.config.scaling["original_max_position_embeddings"]


def rotate_both(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """`rotate` for both, in one kernel if possible."""
    if rotation.interleaved or rotation.cos.shape[-1] < query.shape[-1]:
        return rotate(query, rotation), rotate(key, rotation)
    return block_kernels.rotate(query, key, rotation.cos, rotation.sin)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate `[batch, seq, heads, head_dim]`, or the first part of each head if `rotation` is smaller."""
    size = rotation.cos.shape[-1]
    if size < heads.shape[-1]:
        rotated, rest = heads.split([size, heads.shape[-1] - size], dim=-1)
        return torch.cat([rotate(rotated, rotation), rest], dim=-1)
    if rotation.interleaved:
        turned = torch.stack([-heads[..., 1::2], heads[..., 0::2]], dim=-1).flatten(-2)
        return heads * rotation.cos + turned * rotation.sin
    return block_kernels.rotated(heads, rotation.cos, rotation.sin)


def _plain(config: RopeConfig) -> Tensor:
    exponents = torch.arange(0, config.size, 2, dtype=torch.int64).float() / config.size
    return 1.0 / config.theta**exponents


def _llama3(config: RopeConfig) -> tuple[Tensor, float]:
    """Llama 3.1: low frequencies are divided by the factor, high frequencies kept, the rest interpolated."""
    scaling, frequencies = config.scaling, _plain(config)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling["factor"] + keep * frequencies, 1.0


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): interpolation by wavelength, and a magnitude for longer contexts."""
    scaling, frequencies = config.scaling, _plain(config)
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config.max_positions / original

    def dimension(turns: float) -> float:
        return config.size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.size - 1)
    ramp = (torch.arange(config.size // 2).float() - low) / (high - low or 0.001)
    interpolate = ramp.clamp(0, 1)

    def magnitude(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        scales = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = magnitude(scales[0]) / magnitude(scales[1]) if scales[0] and scales[1] else magnitude()
    return interpolate * frequencies / factor + (1 - interpolate) * frequencies, attention_factor


def _longrope(config: RopeConfig) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2024): frequencies `[2, size / 2]`, for documents up to the original length and beyond."""
    scaling = config.scaling
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config.max_positions / original
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = torch.tensor([scaling["short_factor"], scaling["long_factor"]], dtype=torch.float32)
    return _plain(config) / factors, magnitude


# `dynamic` NTK scaling equals `default` up to the trained length. Beyond it, angles depend on the longest document in
# the batch, which `Rope` rejects.
SCALINGS: dict[str, Callable[[RopeConfig], tuple[Tensor, float]]] = {
    "default": lambda config: (_plain(config), 1.0),
    "linear": lambda config: (_plain(config) / config.scaling["factor"], 1.0),
    "dynamic": lambda config: (_plain(config), 1.0),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
