"""Norms, attention and feed-forward. Each config builds its module, which is called with (hidden, context)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.models.attention import Capability, Choice, Scoring, attend, attend_cached, choose
from tune.models.block_kernels import silu_product
from tune.models.context import Context
from tune.models.rope import RopeConfig, rotate_both

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda hidden: F.relu(hidden).square(),
}


def project(hidden: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """The outputs of linear `layers` for one input. If a layer's class has `outputs`, it computes all at once."""
    kinds: list[Any] = [type(layer) for layer in layers]
    outputs = next((kind.outputs for kind in kinds if hasattr(kind, "outputs")), None)
    return [layer(hidden) for layer in layers] if outputs is None else outputs(hidden, layers)


class PartConfig(Protocol):
    """The config of an attention or feed-forward part. `build` makes a module that is called with (hidden, context)."""

    def build(self, hidden_size: int) -> nn.Module: ...


class AttentionPartConfig(PartConfig, Protocol):
    @property
    def rope(self) -> RopeConfig | None:
        """The rotary embedding that the part needs in its context."""

    @property
    def pair_width(self) -> int:
        """Multiplications per pair of tokens: query with key, and weight with value."""


@dataclass(frozen=True)
class NormConfig:
    """`rms` (Zhang and Sennrich, 2019), `rms_offset` (Gemma's: multiplies by 1 + weight) or `layer` (Ba et al., 2016).
    All compute in fp32."""

    kind: Literal["rms", "rms_offset", "layer"]
    eps: float
    bias: bool = False

    def build(self, size: int) -> nn.Module:
        if self.kind == "layer":
            return nn.LayerNorm(size, eps=self.eps, bias=self.bias)
        return (nn.RMSNorm if self.kind == "rms" else OffsetRMSNorm)(size, eps=self.eps)


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight in fp32, like Gemma's."""

    initial_weight = 0.0

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(input)


@dataclass(frozen=True)
class AttentionConfig:
    """Attention with `num_kv_heads` heads of keys and values; see `Scoring` for window, scale, softcap and sinks.

    `fused` joins the query, key and value projections, to which `bias` applies. `rope=None` does not use positions.
    `gated` multiplies the output of each head by a sigmoid gate from the query projection. `query_key_norm` normalizes
    each head, or with `norm_all_heads` all heads together.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    bias: bool = False
    output_bias: bool = False
    fused: bool = False
    gated: bool = False
    query_key_norm: NormConfig | None = None
    norm_all_heads: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def pair_width(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def path(self, capability: Capability | None, dtype: torch.dtype) -> Choice:
        """The way in which a device of this compute capability computes this attention."""
        size, capped = self.head_dim, self.softcap is not None
        return choose(capability, dtype, size, size, softcap=capped, sinks=self.sinks)

    def build(self, hidden_size: int) -> nn.Module:
        return Attention(self, hidden_size)


class Attention(nn.Module):
    rows = ("output",)

    def __init__(self, config: AttentionConfig, hidden_size: int):
        super().__init__()
        self.config = config
        widths = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.widths = widths
        if config.fused:
            self.query_key_value = nn.Linear(hidden_size, sum(widths), bias=config.bias)
        else:
            sizes = [widths[0] * (2 if config.gated else 1), *widths[1:]]
            self.query, self.key, self.value = (nn.Linear(hidden_size, size, bias=config.bias) for size in sizes)
        self.output = nn.Linear(widths[0], hidden_size, bias=config.output_bias)
        if norm := config.query_key_norm:
            sizes = widths[:2] if config.norm_all_heads else [config.head_dim] * 2
            self.query_norm, self.key_norm = (norm.build(size) for size in sizes)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        queries, keys = ("num_heads",), ("num_kv_heads",)
        columns = {
            "query": queries,
            "key": keys,
            "value": keys,
            "query_key_value": queries + 2 * keys,
            "sinks": queries,
        }
        return columns | ({"query_norm": queries, "key_norm": keys} if self.config.norm_all_heads else {})

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        config = self.config
        if config.fused:
            query, key, value = self.query_key_value(hidden).split(self.widths, dim=-1)
        else:
            query, key, value = project(hidden, [self.query, self.key, self.value])
        if config.query_key_norm and config.norm_all_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (heads.unflatten(-1, (-1, config.head_dim)) for heads in (query, key, value))
        query, gate = (query[..., 0::2, :], query[..., 1::2, :]) if config.gated else (query, None)
        if config.query_key_norm and not config.norm_all_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotation is not None:
            query, key = rotate_both(query, key, context.rotation)
            if context.rotation.query_scale is not None:
                query = query * context.rotation.query_scale
        scoring = Scoring(config.window, config.scale, config.softcap, self.sinks)
        if context.cache is not None:
            context.cache.write(key, value)
        if context.cache is not None and context.cache.place.bias is not None:
            key, value = context.cache.read()
            found = attend_cached(query, key, value, context.cache.place.bias, scoring)
        else:
            found = attend(query, key, value, context.documents, scoring, context.mask)
        return self.output((found if gate is None else found * gate.sigmoid()).flatten(-2))


@dataclass(frozen=True)
class MLPConfig:
    """Feed-forward of width `size`, by default gated (Shazeer, 2020); `fused` joins the gate and up projections."""

    size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    fused: bool = False

    def build(self, hidden_size: int) -> nn.Module:
        return MLP(self, hidden_size)


class MLP(nn.Module):
    columns: ClassVar = {"gate": ("size",), "up": ("size",), "gate_up": ("size", "size")}
    rows = ("down",)

    def __init__(self, config: MLPConfig, hidden_size: int):
        super().__init__()
        self.config = config
        if config.fused:
            self.gate_up = nn.Linear(hidden_size, 2 * config.size, bias=config.bias)
        else:
            if config.gated:
                self.gate = nn.Linear(hidden_size, config.size, bias=config.bias)
            self.up = nn.Linear(hidden_size, config.size, bias=config.bias)
        self.down = nn.Linear(config.size, hidden_size, bias=config.bias)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        activation = ACTIVATIONS[self.config.activation]
        if self.config.fused:
            gate, up = self.gate_up(hidden).chunk(2, dim=-1)
            return self.down(activation(gate) * up)
        if self.config.gated:
            gate, up = project(hidden, [self.gate, self.up])
            return self.down(silu_product(gate, up) if self.config.activation == "silu" else activation(gate) * up)
        return self.down(activation(self.up(hidden)))
