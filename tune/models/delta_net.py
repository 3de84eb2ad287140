"""Gated DeltaNet (Yang et al., 2024): linear attention with one state matrix per head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tune.distributed import cumsum
from tune.models.context import Context
from tune.models.layers import NormConfig

CHUNK = 64  # tokens that are computed in parallel, as in the paper


@dataclass(frozen=True)
class DeltaNetConfig:
    """`num_key_heads` queries and keys of `key_dim`, each for several of the `num_value_heads` values of `value_dim`.

    All are convolved over `kernel` tokens. `norm` is applied to the output of each head.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm: NormConfig
    rope: None = None
    pair_width: int = 0  # linear in the number of tokens

    def build(self, hidden_size: int) -> nn.Module:
        return DeltaNet(self, hidden_size)


class DeltaNet(nn.Module):
    is_recurrent = True
    columns: ClassVar = {
        **dict.fromkeys(("query_key_value", "convolution"), ("num_key_heads", "num_key_heads", "num_value_heads")),
        **dict.fromkeys(("strength", "step", "step_bias", "log_rate", "gate"), ("num_value_heads",)),
    }
    rows = ("readout",)
    # Initial values of parameters that are not normal.
    initializers: ClassVar[dict[str, Callable[[Tensor, Generator], Tensor]]] = {
        "log_rate": lambda empty, generator: empty.uniform_(0.01, 16, generator=generator).log_(),
        "step_bias": lambda empty, generator: empty.fill_(1),
    }

    def __init__(self, config: DeltaNetConfig, hidden_size: int):
        super().__init__()
        self.config = config
        keys, values = config.num_key_heads * config.key_dim, config.num_value_heads * config.value_dim
        self.widths = [keys, keys, values]
        self.query_key_value = nn.Linear(hidden_size, sum(self.widths), bias=False)
        self.convolution = nn.Parameter(torch.empty(sum(self.widths), 1, config.kernel))
        self.strength = nn.Linear(hidden_size, config.num_value_heads, bias=False)
        self.step = nn.Linear(hidden_size, config.num_value_heads, bias=False)
        self.step_bias = nn.Parameter(torch.empty(config.num_value_heads))
        self.log_rate = nn.Parameter(torch.empty(config.num_value_heads))
        self.gate = nn.Linear(hidden_size, values, bias=False)
        self.norm = config.norm.build(config.value_dim)
        self.readout = nn.Linear(values, hidden_size, bias=False)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        config = self.config
        mixed, memory, cache, ends = self.query_key_value(hidden), None, context.cache, None
        before = mixed.new_zeros(len(mixed), config.kernel - 1, mixed.shape[2])
        if cache is not None and context.documents is not None:
            ends = context.documents.boundaries[1:] - 1
        elif cache is not None:
            before, memory = cache.read()
        mixed = torch.cat([before, mixed], dim=1)
        query, key, value = F.silu(self._convolved(mixed, context.positions)).split(self.widths, dim=-1)
        query, key = (_unit(heads.unflatten(-1, (-1, config.key_dim)).float()) for heads in (query, key))
        value = value.unflatten(-1, (-1, config.value_dim)).float()
        groups = value.shape[2] // key.shape[2]
        query, key = (heads.repeat_interleave(groups, dim=2) if groups > 1 else heads for heads in (query, key))
        strength = self.strength(hidden).float().sigmoid()
        log_decay = -self.log_rate.float().exp() * F.softplus(self.step(hidden).float() + self.step_bias)
        documents = (context.positions == 0).cumsum(dim=1) if context.documents is None else context.documents.ids
        output, memory = gated_delta_rule(
            query * config.key_dim**-0.5, key, value, log_decay, strength, documents, memory, ends
        )
        if cache is not None:  # and the last tokens that were convolved
            last = mixed.unfold(1, config.kernel - 1, 1).mT
            cache.write(last[:, -1] if ends is None else last[0][ends + 1], memory)
        gate = F.silu(self.gate(hidden).float()).view_as(output)
        return self.readout((self.norm(output.to(hidden.dtype)) * gate).to(hidden.dtype).flatten(-2))

    def _convolved(self, mixed: Tensor, positions: Tensor) -> Tensor:
        """A causal depthwise convolution within documents; `mixed` begins `kernel - 1` tokens earlier."""
        weight, total = self.convolution[:, 0], None
        for index in range(self.config.kernel):
            back = self.config.kernel - 1 - index
            term = mixed[:, index : mixed.shape[1] - back] * weight[:, index]
            term = term * (positions >= back)[..., None] if back else term
            total = term if total is None else total + term
        assert total is not None
        return total


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    documents: Tensor,
    memory: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs `[batch, seq, heads, value_dim]` and the last memory `[batch, heads, key_dim, value_dim]`, or in a batch
    of one the memories after the tokens at `ends` `[documents]`.

    Each token updates the memory M to d M + s k (v - d Mᵀ k)ᵀ and outputs Mᵀ q, with d = exp(`log_decay`) and
    s = `strength`, both `[batch, seq, heads]`; `query`, `key` are `[batch, seq, heads, key_dim]`, `value` likewise. M
    restarts at zero in each document: `documents` `[batch, seq]` are ascending ids. `memory` is the start of id 0.
    """
    batch, length, heads, key_dim = key.shape
    chunk = min(CHUNK, length)
    padding = -length % chunk  # with strength 0 and decay 1: it does not change the memory
    query, key, value, log_decay, strength = (
        F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, padding)).unflatten(1, (-1, chunk)).movedim(3, 1)
        for tensor in (query, key, value, log_decay, strength)
    )  # [batch, heads, chunks, chunk, ...]
    documents = torch.cat([documents, documents[:, -1:].expand(-1, padding)], dim=1).view(batch, 1, -1, chunk)
    last = documents[..., -1:]
    before = F.pad(last[:, :, :-1], (0, 0, 1, 0))  # the document at the end of the chunk before

    # Decay between each pair of tokens. Logarithms are summed for each pair: differences of cumulative sums from the
    # start of the chunk would lose the gradient to rounding where decay is fast.
    same = (documents[..., :, None] == documents[..., None, :]).tril()
    between = log_decay[..., None].expand(*log_decay.shape, chunk).tril(-1)
    between = cumsum(between, -2)
    between = between.masked_fill(~same, float("-inf")).exp()
    staying = between[..., -1, :, None]  # until the end of the chunk
    arriving = (cumsum(log_decay, -1).exp() * (documents == before))[..., None]  # from the memory before the chunk

    # What a token writes depends on what those before it in the chunk wrote: solve (1 + L) written = wanted.
    weighted = key * strength[..., None]
    mixing = (weighted @ key.mT) * between
    wanted = torch.cat([value * strength[..., None], weighted * arriving], dim=-1)
    solved = torch.linalg.solve_triangular(mixing, wanted, upper=False, unitriangular=True)
    written, recalled = solved.split([value.shape[-1], key_dim], dim=-1)
    within = (query @ key.mT) * between

    memory = key.new_zeros(batch, heads, key_dim, value.shape[-1]) if memory is None else memory
    outputs, memories, writings = [], [], []
    parts = (written, recalled, within, query * arriving, key * staying, arriving[..., -1:, :])
    for new, known, inside, queries, keys, left in zip(*(part.unbind(2) for part in parts), strict=True):
        new = new - known @ memory
        memories.append(memory)
        writings.append(new)
        outputs.append(queries @ memory + inside @ new)
        memory = memory * left + keys.mT @ new
    output = torch.stack(outputs, dim=2).movedim(1, 3).flatten(1, 2)[:, :length]
    if ends is None:
        return output, memory
    chunks, at = ends // chunk, ends % chunk
    before, new = (torch.stack(tensors, dim=2)[0][:, chunks] for tensors in (memories, writings))
    keys = key[0][:, chunks] * between[0][:, chunks, at, :, None]
    return output, (before * arriving[0][:, chunks, at, :, None] + keys.mT @ new).transpose(0, 1)


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + 1e-6)
