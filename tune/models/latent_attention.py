"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one latent vector."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tune.models.attention import Capability, Choice, Scoring, attend, attend_cached, choose
from tune.models.context import Context
from tune.models.layers import NormConfig
from tune.models.rope import RopeConfig, rotate


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Queries and keys have `plain_size` dimensions and the dimensions that `rope` rotates, which all key heads share.

    Keys and values are projected from `key_value_rank` dimensions, queries from `query_rank` (None: hidden states).
    """

    num_heads: int
    plain_size: int
    value_size: int
    rope: RopeConfig
    key_value_rank: int
    query_rank: int | None
    norm: NormConfig
    scale: float
    bias: bool = False

    @property
    def pair_width(self) -> int:
        return self.num_heads * (self.plain_size + self.rope.size + self.value_size)

    def path(self, capability: Capability | None, dtype: torch.dtype) -> Choice:
        """The way in which a device of this compute capability computes this attention."""
        return choose(capability, dtype, self.plain_size + self.rope.size, self.value_size)

    def build(self, hidden_size: int) -> nn.Module:
        return LatentAttention(self, hidden_size)


class LatentAttention(nn.Module):
    columns: ClassVar = {"query": ("num_heads",), "query_up": ("num_heads",), "key_value_up": ("num_heads",)}
    rows = ("output",)

    def __init__(self, config: LatentAttentionConfig, hidden_size: int):
        super().__init__()
        self.config = config
        query_width = config.num_heads * (config.plain_size + config.rope.size)
        if config.query_rank is None:
            self.query = nn.Linear(hidden_size, query_width, bias=False)
        else:
            self.query_down = nn.Linear(hidden_size, config.query_rank, bias=config.bias)
            self.query_norm = config.norm.build(config.query_rank)
            self.query_up = nn.Linear(config.query_rank, query_width, bias=False)
        self.key_value_down = nn.Linear(hidden_size, config.key_value_rank + config.rope.size, bias=config.bias)
        self.key_value_norm = config.norm.build(config.key_value_rank)
        key_value_width = config.num_heads * (config.plain_size + config.value_size)
        self.key_value_up = nn.Linear(config.key_value_rank, key_value_width, bias=False)
        self.output = nn.Linear(config.num_heads * config.value_size, hidden_size, bias=config.bias)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        config = self.config
        if config.query_rank is None:
            query = self.query(hidden)
        else:
            query = self.query_up(self.query_norm(self.query_down(hidden)))
        query = query.unflatten(-1, (-1, config.plain_size + config.rope.size))
        query_plain, query_rotated = query.split([config.plain_size, config.rope.size], dim=-1)
        latent, key_rotated = self.key_value_down(hidden).split([config.key_value_rank, config.rope.size], dim=-1)
        assert context.rotation is not None
        query_rotated = rotate(query_rotated, context.rotation)
        key_rotated = rotate(key_rotated[:, :, None], context.rotation)
        latent, scoring, cache = self.key_value_norm(latent), Scoring(scale=config.scale), context.cache
        if cache is not None:
            cache.write(torch.cat([latent[:, :, None], key_rotated], dim=-1))
        if cache is not None and cache.place.bias is not None:
            # Instead of projecting all latents up, project the query down: the latents then are keys and values.
            plain_up, value_up = self._up(latent).split([config.plain_size, config.value_size], dim=-1)
            query = torch.cat([torch.einsum("bshd,rhd->bshr", query_plain, plain_up), query_rotated], dim=-1)
            (key,) = cache.read()
            found = attend_cached(query, key, key[..., : config.key_value_rank], cache.place.bias, scoring)
            return self.output(torch.einsum("bshr,rhd->bshd", found, value_up).flatten(-2))
        key_value = self.key_value_up(latent).unflatten(-1, (-1, config.plain_size + config.value_size))
        key_plain, value = key_value.split([config.plain_size, config.value_size], dim=-1)
        query = torch.cat([query_plain, query_rotated], dim=-1)
        key = torch.cat([key_plain, key_rotated.expand(-1, -1, key_plain.shape[2], -1)], dim=-1)
        return self.output(attend(query, key, value, context.documents, scoring).flatten(-2))

    def _up(self, like: Tensor) -> Tensor:
        """The matrix of `key_value_up`, `[rank, heads, size]`, also if it is adapted or quantized."""
        up, config = self.key_value_up, self.config
        matrix = up.weight.mT if type(up) is nn.Linear else up(torch.eye(up.in_features).to(like))
        return matrix.unflatten(-1, (-1, config.plain_size + config.value_size))
