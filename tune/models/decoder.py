"""The one decoder. A family says in its own file what its config.json means here and how its parameters are named."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.errors import TuneError
from tune.models.attention import Segments, attend, attend_cached
from tune.models.rope import Rope, RopeConfig, rotate


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    tied_head: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    initializer_range: float = 0.02


class LossFunction(Protocol):
    """A loss that reads hidden states `[..., hidden]`, the output weight `[vocab, hidden]` and labels `[...]`."""

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor: ...


class KeyValueCache:
    """Keys and values of the tokens seen so far: slot j of a row holds its position j."""

    def __init__(self, config: DecoderConfig, rows: int, capacity: int, device: torch.device, dtype: torch.dtype):
        shape = (config.num_layers, 2, rows, capacity, config.num_kv_heads, config.head_dim)
        self.storage = torch.zeros(shape, device=device, dtype=dtype)

    def update(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        for slot, new in zip(self.storage[layer], (key, value), strict=True):
            slot[rows, positions] = new
        keys, values = self.storage[layer]
        return keys, values


@dataclass(frozen=True)
class Context:
    """What all blocks of one forward share."""

    rotation: tuple[Tensor, Tensor]
    segments: Segments | None
    positions: Tensor
    cache: KeyValueCache | None


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.key = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.value = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.output = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        norm = config.query_key_norm
        self.query_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if norm else nn.Identity()
        self.key_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if norm else nn.Identity()

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)) for projection in (self.query, self.key, self.value)
        )
        query = rotate(self.query_norm(query), context.rotation)
        key = rotate(self.key_norm(key), context.rotation)
        if context.cache is None:
            heads = attend(query, key, value, context.segments)
        else:
            key, value = context.cache.update(self.layer, key, value, context.positions)
            heads = attend_cached(query, key, value, context.positions)
        return self.output(heads.flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward with SiLU (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Block(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), context)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    """A causal language model.

    Rows of `tokens` `[batch, seq]` may hold several documents: `documents` tells them apart, `positions` restart at
    each. Without them a row is one document. Returns logits `[batch, seq, vocab]`, or, given `loss_fn`, the loss of
    `labels` `[batch, seq]` (already shifted): it is computed in here, from hidden states and the output weight, so that
    full logits never exist and FSDP has the weight gathered.
    """

    # How a checkpoint names the parameters, and endings of tensors in it that are not among them; set by `build`.
    disk_names: dict[str, str]
    not_weights: tuple[str, ...] = ()

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.rope = Rope(config.rope)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        # A tied head has no module of its own: one parameter, one name, one gradient.
        self.head = None if config.tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        loss_fn: LossFunction | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        segments = None if documents is None else Segments.of(documents)
        if self.config.rope.kind == "dynamic":
            self._refuse_rescaling(segments, tokens)
        hidden = self.embedding(tokens)
        context = Context(self.rope(positions, hidden.dtype), segments, positions, cache)
        for block in self.blocks:
            hidden = block(hidden, context)
        hidden = self.norm(hidden)
        hidden, weight = _operands(self.embedding if self.head is None else self.head, hidden)
        if loss_fn is None:
            return F.linear(hidden, weight)
        assert labels is not None, "loss_fn needs labels"
        return loss_fn(hidden, weight, labels)

    def _refuse_rescaling(self, segments: Segments | None, tokens: Tensor) -> None:
        longest = tokens.shape[1] if segments is None else max(segments.lengths)
        if longest > self.config.rope.max_positions:
            raise TuneError(
                f"max_seq_len: a document of {longest} tokens is longer than the {self.config.rope.max_positions} "
                "this model was trained for, and its 'dynamic' rope scaling would make the loss depend on what else is "
                "in the batch. Lower max_seq_len, or set rope_scaling in config.json to 'linear' or 'yarn'."
            )


def _operands(head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and weight whose product is the logits: an adapted head makes both wider."""
    operands = getattr(head, "operands", None)
    return (hidden, head.weight) if operands is None else operands(hidden)  # type: ignore[return-value]
