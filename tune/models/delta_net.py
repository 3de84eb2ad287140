"""Gated DeltaNet (Yang et al., 2024): linear attention with a state matrix per head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tune.distributed import cumsum
from tune.models.context import Context
from tune.models.layers import NormConfig

CHUNK = 64  # tokens computed in parallel, as in the paper
SPAN = 8  # chunks, or groups of chunks, that pass the memory on one by one


@dataclass(frozen=True)
class DeltaNetConfig:
    """`num_key_heads` queries and keys of size `key_dim`, each for several of `num_value_heads` values of `value_dim`.

    All are convolved over `kernel` tokens. `norm` applies to the output of each head.
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
    # Parameters whose initial values are not normal.
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
        value = value.unflatten(-1, (-1, config.value_dim))
        strength = self.strength(hidden).float().sigmoid()
        log_decay = -self.log_rate.float().exp() * F.softplus(self.step(hidden).float() + self.step_bias)
        documents = (context.positions == 0).cumsum(dim=1) if context.documents is None else context.documents.ids
        output, memory = gated_delta_rule(
            query * config.key_dim**-0.5, key, value, log_decay, strength, documents, memory, ends
        )
        if cache is not None:  # includes the last inputs of the convolution
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
    """Outputs `[batch, seq, heads, value_dim]` and the last memory `[batch, heads, key_dim, value_dim]`.

    If `ends` `[documents]` is given, the batch has one row, and the memories after these tokens are returned instead of
    the last one.

    Each token updates the memory M to d M + s k (v - d Mᵀ k)ᵀ and outputs Mᵀ q, with d = exp(`log_decay`) and
    s = `strength`, both `[batch, seq, heads]`. `query` and `key` are `[batch, seq, key_heads, key_dim]`, each for
    several heads of `value`. The computation is in the dtype of `key`. M restarts at zero in each document; `documents`
    `[batch, seq]` are ascending ids. `memory` is the initial memory of id 0.
    """
    (batch, length, heads, _), key_dim = value.shape, key.shape[3]
    chunk = min(CHUNK, length)
    count = (length + chunk - 1) // chunk
    inputs, padding = [query, key, value.to(key.dtype), log_decay, strength], count * chunk - length
    if padding or torch.compiler.is_compiling():  # padding has strength 0 and decay 1, and does not change the memory
        inputs = [F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, padding)) for tensor in inputs]
        documents = torch.cat([documents, documents[:, -1:].expand(-1, padding)], dim=1)
    query, key, value, log_decay, strength = (tensor.unflatten(1, (count, chunk)).movedim(3, 1) for tensor in inputs)
    # [batch, heads, chunks, chunk, ...]
    documents = documents.view(batch, 1, count, chunk)
    last = documents[..., -1:]
    before = F.pad(last[:, :, :-1], (0, 0, 1, 0))  # the document at the end of the previous chunk

    # Decay between each pair of tokens. Logarithms are summed per pair, since differences of cumulative sums from the
    # start of the chunk would lose the gradient to rounding if decay is fast.
    same = (documents[..., :, None] == documents[..., None, :]).tril()
    between = log_decay[..., None].expand(*log_decay.shape, chunk).tril(-1)
    between = cumsum(between, -2)
    between = between.masked_fill(~same, float("-inf")).exp()
    staying = between[..., -1, :, None]  # decay until the end of the chunk
    arriving = (cumsum(log_decay, -1).exp() * (documents == before))[..., None]  # decay of the memory before the chunk

    def shared(keys: Tensor, factors: Tensor) -> Tensor:
        """The product of `keys`, which several heads share, with the `factors` of each head."""
        return (keys[:, :, None] * factors.unflatten(1, (keys.shape[1], -1))).flatten(1, 2)

    # A token's write depends on the writes of earlier tokens in the chunk: solve (1 + L) written = wanted.
    strength = strength[..., None]
    mixing = shared(key @ key.mT, between * strength)
    wanted = torch.cat([value * strength, shared(key, -strength * arriving)], dim=-1)
    solved = torch.linalg.solve_triangular(mixing, wanted, upper=False, unitriangular=True)
    written, known = solved.split([value.shape[-1], key_dim], dim=-1)

    memory = key.new_zeros(batch, heads, key_dim, value.shape[-1]) if memory is None else memory
    left = arriving[..., -1:, :]
    pass_on = Recurrence.apply if count > 1 else _passed_on  # with one chunk, autograd skips what is not needed
    memories, written, memory = pass_on(memory, written, known, shared(key, staying), left)
    output = shared(query, arriving) @ memories + shared(query @ key.mT, between) @ written
    output = output.movedim(1, 3).flatten(1, 2)[:, :length]
    if ends is None:
        return output, memory
    chunks, at = ends // chunk, ends % chunk
    keys = key[0].repeat_interleave(heads // key.shape[1], dim=0)[:, chunks] * between[0][:, chunks, at, :, None]
    kept = memories[0][:, chunks] * arriving[0][:, chunks, at, :, None]
    return output, (kept + keys.mT @ written[0][:, chunks]).transpose(0, 1)


class Recurrence(torch.autograd.Function):
    """`_passed_on` with its own backward.

    Gradients are passed on like memories, from the last chunk to the first, with `keys` and `known` exchanged. No
    intermediate results are saved.
    """

    @staticmethod
    def forward(context: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        pass_on = _passed_on_whole if torch.compiler.is_compiling() else _passed_on
        memories, written, last = pass_on(*inputs)
        context.save_for_backward(*inputs[2:], memories, written)
        return memories, written, last

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        known, keys, left, memories, written = context.saved_tensors
        of_memories, of_written, of_last = gradients
        pass_on = _passed_on_whole if torch.compiler.is_compiling() else _passed_on
        after, of_written, of_first = pass_on(of_last, of_written, keys, known, left, of_memories, True)
        of_left = (after * memories).sum(dim=(-2, -1), keepdim=True)
        return of_first, of_written, of_written @ memories.mT, written @ after.mT, of_left


def _passed_on(
    memory: Tensor, written: Tensor, known: Tensor, keys: Tensor | None, left: Tensor, added: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The memories before each chunk, the writes of each chunk, and the last memory.

    With the memory M `[batch, heads, key_dim, width]`, a chunk writes W = `written` + `known` M, and the next chunk
    gets `left` M + `keys`ᵀ W + `added`. These are `[batch, heads, chunks, ...]`; without `keys`, W itself is added.

    Going from chunk to chunk would launch thousands of small products. Each chunk is an affine map of the memory, so
    groups of chunks compute their maps in parallel, by applying them to zero and to the identity. The maps pass the
    memory on from group to group, in the same way. Then all groups pass it from chunk to chunk at once.
    """
    batch, heads, count = known.shape[:3]
    span = _span(count, known.device)
    groups = -(-count // span)
    parts: list[Any] = []
    for part in (written, known, keys, left, added):
        if part is not None and count % span:  # padded with chunks that do not change the memory
            part = F.pad(part, (0, 0, 0, 0, 0, groups * span - count), value=int(part is left))
        parts.append(part if part is None else part.reshape(batch * heads * groups, span, *part.shape[3:]))
    last = None
    if groups > 1:
        memory, last = _from_group_to_group(memory, parts, reverse)
    memory, memories, writings = memory.flatten(0, -3), [], []
    for chunk in _in_turn(parts, reverse):
        memories.append(memory)
        memory, new = _next(memory, *chunk)
        writings.append(new)
    all_memories, all_written = (
        torch.stack(each[::-1] if reverse else each, dim=1).view(batch, heads, groups * span, *each[0].shape[1:])
        for each in (memories, writings)
    )
    last = memory.unflatten(0, (batch, heads)) if last is None else last
    return all_memories[:, :, :count], all_written[:, :, :count], last


@torch.library.custom_op("tune::passed_on", mutates_args=())
def _passed_on_whole(
    memory: Tensor, written: Tensor, known: Tensor, keys: Tensor, left: Tensor, added: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_passed_on` as one operation, since a compiler would unroll its loop for each number of chunks."""
    memories, writings, last = _passed_on(memory, written, known, keys, left, added, reverse)
    return memories.contiguous(), writings.contiguous(), last.contiguous()


@_passed_on_whole.register_fake
def _(memory: Tensor, written: Tensor, known: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    memories = memory.new_empty(*known.shape[:3], *memory.shape[2:])
    return memories, written.new_empty(written.shape), memory.new_empty(memory.shape)


def _span(count: int, device: torch.device) -> int:
    """The number of chunks that pass the memory on one by one. A CPU launches no kernels, so groups only add work."""
    return count if device.type == "cpu" else min(SPAN, count)


def _from_group_to_group(memory: Tensor, parts: list[Any], reverse: bool) -> tuple[Tensor, Tensor]:
    """The memories before each group of chunks, and the last memory; see `_passed_on`."""
    size, width = memory.shape[-2:]
    wide = [
        F.pad(part, (0, size)) if part is not None and index in (0, 4) else part for index, part in enumerate(parts)
    ]
    made = F.pad(torch.eye(size, dtype=memory.dtype, device=memory.device), (width, 0)).expand(len(parts[0]), -1, -1)
    for chunk in _in_turn(wide, reverse):
        made, _ = _next(made, *chunk)
    total, effect = made.unflatten(0, (*memory.shape[:2], -1)).split([width, size], dim=-1)
    left = memory.new_zeros(1).expand(*total.shape[:3], 1, 1)
    starts, _, last = _passed_on(memory, total, effect, None, left, None, reverse)
    return starts, last


def _in_turn(parts: list[Any], reverse: bool) -> list[Any]:
    """The parts of each chunk, from `[groups, chunks, ...]`."""
    count = parts[0].shape[1]
    chunks = list(zip(*([None] * count if part is None else part.unbind(1) for part in parts), strict=True))
    return chunks[::-1] if reverse else chunks


def _next(
    memory: Tensor, written: Tensor, known: Tensor, keys: Tensor | None, left: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The memory `[groups, key_dim, width]` after a chunk, and the chunk's writes."""
    written = torch.baddbmm(written, known, memory)
    if keys is None:
        return torch.addcmul(written, left, memory), written
    kept = left * memory if added is None else torch.addcmul(added, left, memory)
    return kept.baddbmm_(keys.mT, written), written


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + 1e-6)
