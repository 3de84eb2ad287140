"""The decoder of all families: embedding, blocks, norm, head."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.collators import Batch, Documents
from tune.distributed import Peers, Stage
from tune.errors import TuneError
from tune.models.attention import Capability, Choice
from tune.models.context import Context, KeyValueCache, Masks
from tune.models.layers import AttentionPartConfig, NormConfig, PartConfig
from tune.models.moe import ExpertsConfig
from tune.models.names import Names
from tune.models.rope import Rope
from tune.models.routing import RoutingStats, RoutingSums
from tune.quantization import NF4Weight


@dataclass(frozen=True)
class LayerConfig:
    """A block: its two parts, and whether they have norms on their inputs, on their outputs or both.

    `parallel` gives both parts the same input. `residual_multiplier` multiplies their outputs before the addition.
    """

    attention: AttentionPartConfig
    mlp: PartConfig
    norm_before: bool = True
    norm_after: bool = False
    parallel: bool = False
    residual_multiplier: float = 1.0


@dataclass(frozen=True)
class DecoderConfig:
    """The architecture of a decoder. Logits are multiplied by `logit_scale`, then bounded by `logit_softcap` with tanh.

    `router_loss` is the weight of the load-balancing loss, averaged over the layers with experts. With `scores`, the
    head has one output: the score of a document is the output at its last token that is not `pad_id`.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    tied_head: bool
    embedding_multiplier: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    router_loss: float = 0.0
    initializer_range: float = 0.02
    scores: bool = False
    pad_id: int | None = None

    def attention_paths(self, capability: Capability | None, dtype: torch.dtype) -> list[Choice | None]:
        """The way in which a device of this compute capability (None: not CUDA) computes the attention of each layer;
        None for layers without attention. See `tune.models.attention.choose`."""
        parts: list[Any] = [layer.attention for layer in self.layers]
        return [part.path(capability, dtype) if hasattr(part, "path") else None for part in parts]


class Head(Protocol):
    """A function that replaces the output projection and returns a scalar loss, or values per token.

    Its arguments are hidden states `[rows, seq, hidden]`, the output weight `[vocab, hidden]` and the batch. Models
    that bound their logits also pass `softcap`: logits become softcap * tanh(logits / softcap).
    """

    def __call__(self, hidden: Tensor, weight: Tensor, batch: Batch, *, softcap: float | None = None) -> Any: ...


class TrainableModel(Protocol):
    """The interface of models for recipes, checkpointers, adapters and exporters, which `Decoder` and
    `HuggingFaceModel` implement.

    Your own module needs `config.vocab_size`, `__call__` and an `nn.ModuleList` of blocks. Without `names`, names on
    disk are those of `state_dict()`. Without `max_positions`, documents may have any length. Without `routing`, no
    statistics of experts are logged.
    """

    config: Any
    names: Names
    routing: RoutingSums | None

    @property
    def max_positions(self) -> int | None:
        """The length of documents that the model was trained for."""

    def __call__(self, batch: Batch | Tensor, head: Head | None = None) -> Any:
        """Returns `head(hidden, weight, batch)`, or without a head logits `[rows, seq, vocab]`."""


class Block(nn.Module):
    def __init__(self, config: LayerConfig, norm: NormConfig, hidden_size: int):
        super().__init__()
        self.config = config

        def norm_if(wanted: bool) -> nn.Module:
            return norm.build(hidden_size) if wanted else nn.Identity()

        self.attention_norm = norm_if(config.norm_before)
        self.attention = config.attention.build(hidden_size)
        self.attention_output_norm = norm_if(config.norm_after)
        self.mlp_norm = norm_if(config.norm_before and not config.parallel)
        self.mlp = config.mlp.build(hidden_size)
        self.mlp_output_norm = norm_if(config.norm_after)

    def forward(self, hidden: Tensor, context: Context) -> tuple[Tensor, RoutingStats | None]:
        """The new hidden states and, in training, the statistics of the router if the layer has experts."""
        normed = self.attention_norm(hidden)
        hidden = self._add(hidden, self.attention_output_norm(self.attention(normed, context)))
        output = self.mlp(normed if self.config.parallel else self.mlp_norm(hidden), context)
        output, stats = output if isinstance(output, tuple) else (output, None)
        return self._add(hidden, self.mlp_output_norm(output)), stats

    def _add(self, hidden: Tensor, output: Tensor) -> Tensor:
        multiplier = self.config.residual_multiplier
        return hidden + (output if multiplier == 1 else output * multiplier)


class Decoder(nn.Module):
    """A causal language model: embedding, blocks, output.

    The input is a `Batch`, or `tokens` `[rows, seq]` with one document per row. The output is logits
    `[rows, seq, vocab]`, or the result of `head`. The head is called inside the forward, where FSDP has gathered the
    output weight, so that full logits never exist. The result does not include the load-balancing loss of experts,
    whose gradient is added in the backward (`RoutingSums.charge`).
    """

    attends_to_parts = True  # supports parts of batches: see `tune.collators.Part`
    has_dropout = False  # whether adapters have dropout in training
    token_peers: Peers | None = None  # with tensor parallelism: processes that share tokens between the parts of blocks
    names: Names  # set by `build`
    routing: RoutingSums | None  # statistics of routers in training; None without experts

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.routing = RoutingSums() if any(isinstance(layer.mlp, ExpertsConfig) for layer in config.layers) else None
        # A recurrent layer has one state per row, so documents cannot share a prefix.
        self.shares_prefixes = all(layer.attention.pair_width for layer in config.layers)
        self.ropes = {rope: Rope(rope) for layer in config.layers if (rope := layer.attention.rope)}
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(layer, config.norm, config.hidden_size) for layer in config.layers)
        self.norm = config.norm.build(config.hidden_size)
        self.stages: Iterable[Stage] = [Stage.whole(len(config.layers))]  # computed by a forward, in this order
        # A tied head has no module of its own: one parameter, one name, one gradient.
        outputs = 1 if config.scores else config.vocab_size
        self.head = None if config.tied_head else nn.Linear(config.hidden_size, outputs, bias=False)

    @property
    def head_module(self) -> nn.Module:
        """The head, or the embedding whose weight it shares; None in a pipeline stage with neither."""
        return self.embedding if self.config.tied_head else self.head  # type: ignore[return-value]

    @property
    def max_positions(self) -> int | None:
        """The length of documents that the model was trained for; None without rotary embeddings."""
        return min((rope.config.trained_length for rope in self.ropes.values()), default=None)

    @property
    def max_generated(self) -> int | None:
        """The maximum length of documents generated with a cache; None without rotary embeddings."""
        return min((rope.config.cached_length for rope in self.ropes.values()), default=None)

    def costs(self, length: int = 1) -> list[float]:
        """FLOPs of forward and backward per token in each block and the head, on average over a document of `length`.

        They are `weight_flops`, plus 6 for each pair of tokens and dimension of queries and values. Pairs are those
        that the causal mask and the window leave. Embedding lookups cost nothing.
        """
        costs = [weight_flops(part) for part in (*self.blocks, self.head_module)]
        for index, attention in enumerate(layer.attention for layer in self.config.layers):
            seen = min(length, getattr(attention, "window", None) or length)
            costs[index] += 6 * attention.pair_width * seen * (2 * length - seen + 1) / (2 * length)
        return costs

    def keep_stages(self, stages: Sequence[Stage]) -> None:
        """Delete all parameters that are not part of these pipeline stages. The first stage also has the embedding, the
        last one the norm and the head. Names do not change."""
        is_first, is_last = stages[0].is_first, stages[-1].is_last
        for index in {*range(len(self.blocks))} - {block for stage in stages for block in stage.blocks}:
            self.blocks[index] = nn.Identity()
        if not (is_first or (is_last and self.config.tied_head)):
            del self.embedding
        if not is_last:
            self.head = None
            del self.norm

    def forward(
        self,
        batch: Batch | Tensor,
        head: Head | None = None,
        *,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Any:
        """Compute logits or the result of `head`; see the class.

        With a `cache`, for generation: prefill (documents packed in one row, with logits of each document's last token,
        `[documents, 1, vocab]`), or decode (new tokens at `positions` `[rows, seq]` for each row of the cache, with
        logits of the last token of each row).
        """
        for stage in self.stages:
            output = self._compute(stage, batch, head, positions, cache)
        return output

    def _compute(
        self, stage: Stage, batch: Batch | Tensor, head: Head | None, positions: Tensor | None,
        cache: KeyValueCache | None,
    ) -> Any:  # fmt: skip
        """The forward of one stage, see `forward`."""
        shared = batch.shared if isinstance(batch, Batch) and self._can_share(batch.documents) else None
        if isinstance(batch, Batch):
            if batch.pictures is not None:
                raise TuneError(
                    "model: the rows have pictures, and this model reads only their text. Set "
                    "model._component_=tune.models.hf, or use rows without pictures"
                )
            computed = shared or batch
            tokens, positions, documents = computed.tokens, computed.positions, computed.documents
        else:
            tokens, documents = batch, None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        first = self.embed if stage.is_first else stage.receive  # no reference to its result is kept while blocks run
        hidden = self.run_blocks(first(tokens), positions, documents, cache, stage.blocks)
        if self.routing is not None and isinstance(batch, Batch):
            in_step = batch.supervised_in_step
            supervised = batch.documents.whole.num_supervised.sum() if in_step is None else in_step
            hidden = self.routing.charge(hidden, self.config.router_loss, supervised)
        if cache is not None and documents is not None:
            hidden = hidden[0][documents.boundaries[1:] - 1, None]
        elif cache is not None:
            hidden = hidden[:, -1:]
        if not stage.is_last:
            return stage.send(hidden)
        hidden, weight = self.output_operands(hidden)
        if shared is not None:
            hidden = shared.of_batch(hidden)
        softcap = self.config.logit_softcap
        function: Any = head or self.logits
        return function(hidden, weight, batch, **{"softcap": softcap} if softcap else {})

    def _can_share(self, documents: Documents) -> bool:
        """Whether `documents` may share prefixes: a token must depend only on the tokens before it, all present here.

        With dropout, a shared token would have the mask of only one of its documents.
        """
        drops = self.has_dropout and self.training
        fits = max(documents.lengths) <= (self.max_generated or max(documents.lengths))
        return self.shares_prefixes and not drops and fits

    @staticmethod
    def logits(hidden: Tensor, weight: Tensor, batch: Batch | Tensor, *, softcap: float | None = None) -> Tensor:
        """The head that returns the logits of all tokens, `[rows, seq, vocab]`."""
        logits = F.linear(hidden, weight)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def new_cache(self, rows: int, capacity: int) -> KeyValueCache:
        """A cache for `rows` documents of at most `capacity` tokens."""
        parts = [layer.attention for layer in self.config.layers]
        windows = [None if part.pair_width == 0 else getattr(part, "window", None) or capacity for part in parts]
        return KeyValueCache(windows, rows, capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: `[rows, seq]` -> `[rows, seq, hidden]`."""
        hidden = self.embedding(tokens)
        if self.config.embedding_multiplier != 1:  # rounded to the dtype of the computation, as in Gemma's training
            hidden = hidden * torch.tensor(self.config.embedding_multiplier, dtype=hidden.dtype)
        return hidden

    def run_blocks(
        self, hidden: Tensor, positions: Tensor, documents: Documents | None, cache: KeyValueCache | None = None,
        indices: range | None = None,
    ) -> Tensor:  # fmt: skip
        """The hidden states after the blocks with these `indices` (None: all)."""
        rotations = {config: rope(positions, documents, hidden.dtype) for config, rope in self.ropes.items()}
        peers = self.token_peers if cache is None else None  # generation has one token per row
        if peers is not None:
            hidden = peers.own_tokens(hidden)  # reassigned, so that all tokens are not kept while blocks run
        is_decoded = cache is not None and documents is None
        masks = None if is_decoded else Masks(documents, positions.shape, hidden.device, hidden.dtype)
        stats = []
        for index, (block, layer) in enumerate(zip(self.blocks, self.config.layers, strict=True)):
            if indices is not None and index not in indices:
                if self.training and isinstance(layer.mlp, ExpertsConfig):
                    none = hidden.new_zeros((), dtype=torch.float32)
                    stats.append(RoutingStats(none.expand(layer.mlp.router.num_experts), none, none))
                continue
            rotation = rotations[layer.attention.rope] if layer.attention.rope else None
            mask = masks.of(layer.attention) if masks else None
            context = Context(rotation, documents, positions, cache.layers[index] if cache else None, mask)
            hidden, layer_stats = block(hidden, context)
            stats += [layer_stats] if layer_stats else []
        if stats and self.routing is not None and documents is not None:
            self.routing.add(stats, documents.whole)
        return hidden if peers is None else peers.all_tokens(hidden, positions.shape)

    def output_operands(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the final norm, and return inputs and weight whose product is the logits."""
        hidden = self.norm(hidden)
        if self.config.logit_scale != 1:
            hidden = hidden * self.config.logit_scale
        return head_operands(self.head_module, hidden)


def weight_flops(model: nn.Module, without: Collection[Tensor] = ()) -> float:
    """FLOPs of forward and backward per token, by the weights that it uses, except those in `without`.

    6 for a trained weight (2 forward, 4 backward), 4 for a frozen weight (no gradient of its own). Recomputation is not
    included.
    """
    total = 0.0
    for module in model.modules():
        share = getattr(module, "activated_share", 1.0)  # share of experts that a token uses
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, NF4Weight):
                share = 2 if name == "codes" else 0  # weights per byte
            if parameter not in without:
                total += (6 if parameter.requires_grad else 4) * parameter.numel() * share
    return total


def head_operands(head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and weight whose product is the logits; an adapted head concatenates its factors to both."""
    operands = getattr(head, "operands", None)
    return (hidden, head.weight) if operands is None else operands(hidden)  # type: ignore[return-value]
