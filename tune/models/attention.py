"""Causal attention within documents by the fastest kernel that supports the case; `attend_masked` is the reference."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tune import rehearsal
from tune.collators import Documents, Part
from tune.models.flash import Spans, efficient, flash
from tune.models.flex import flex

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Path: TypeAlias = Literal["flash", "flex", "efficient", "math"]
Capability: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Scoring:
    """The computation of attention scores.

    A token attends to itself and the `window - 1` tokens before it (None: all tokens before it). Scores are multiplied
    by `scale` (None: 1 / sqrt(head_dim)), then bounded to (-softcap, softcap) by tanh. `sinks` `[heads]` are the scores
    of one more key without a value.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether SDPA can compute these scores."""
        return self.softcap is None and self.sinks is None


PLAIN = Scoring()


class Choice(NamedTuple):
    path: Path
    because: str = ""  # why it is not the fastest path


def choose(
    capability: Capability | None, dtype: torch.dtype, query_size: int, value_size: int, *, softcap: bool = False,
    sinks: bool = False,
) -> Choice:  # fmt: skip
    """Choose how a device computes attention with heads of these sizes. This is the only place that decides it.

    - `flash`: FlashAttention
    - `flex`: FlexAttention, compiled
    - `efficient`: other fused kernels of PyTorch, including those for CPUs
    - `math`: matrix products, with the scores in memory

    `capability` is the compute capability of a CUDA device, None for other devices.
    """
    is_plain, sizes = not (softcap or sinks), (query_size, value_size)
    if capability is None:
        return Choice("efficient") if is_plain else Choice("math", "only GPUs have kernels for soft caps and sinks")
    if capability < (8, 0):
        because = f"fast kernels need compute capability 8.0, but this GPU has {capability[0]}.{capability[1]}"
        return Choice("efficient" if is_plain and dtype != torch.bfloat16 else "math", because)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return Choice("math", f"no kernel supports {str(dtype).removeprefix('torch.')}")
    because = ""
    if softcap:
        because = "FlashAttention does not support soft caps"
    elif sinks and torch.version.hip:
        because = "FlashAttention on ROCm does not return the log-sums that sinks need"
    elif dtype == torch.float32:
        because = "FlashAttention only supports bf16 and fp16"
    elif not value_size <= query_size <= 256:
        because = f"FlashAttention supports heads of up to 256, with values no larger, but this model has {sizes}"
    if not because:
        return Choice("flash")
    if is_plain:
        return Choice("efficient", because)
    if min(sizes) >= 16 and max(sizes) <= 256:
        return Choice("flex", because)
    return Choice("math", f"FlexAttention supports heads of 16 to 256, but the heads of this model have {query_size}")


def capability(device: torch.device) -> Capability | None:
    """The compute capability of a CUDA device; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def attend(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, scoring: Scoring = PLAIN,
    mask: "BlockMask | None" = None,
) -> Tensor:  # fmt: skip
    """Causal attention of `query` `[batch, seq, heads, head_dim]` to `key`, `value` `[batch, seq, kv_heads, head_dim]`.

    `documents=None` means one document per row. Values, and so the result, may have another head size. `mask` is for
    FlexAttention (`tune.models.flex.block_mask`), which is not used without it. All paths compute the same as
    `attend_masked`.
    """
    attended: Documents | Part | None = documents
    if documents is not None and documents.part is not None:
        attended = documents.part
        key, value = attended.attended(key, value)
    found = capability(query.device)
    kernel, _ = choose(
        found, query.dtype, query.shape[-1], value.shape[-1], softcap=scoring.softcap is not None,
        sinks=scoring.sinks is not None,
    )  # fmt: skip
    if kernel == "flash":
        spans = _spans(query, documents, attended)
        output = flash(*_flat(query, key, value), spans, scoring.scale, scoring.window, scoring.sinks)
        return output.unflatten(0, query.shape[:2])
    if kernel == "flex" and mask is not None:
        output = flex(*_flat(query, key, value), mask, scoring.scale, scoring.softcap, scoring.sinks)
        return output.unflatten(0, query.shape[:2])
    # Compilers do not know this kernel's gradients.
    is_known = found is not None and not torch.version.hip and not torch.compiler.is_compiling()
    if kernel == "efficient" and is_known and scoring.window is None:
        output = efficient(*_flat(query, key, value), _spans(query, documents, attended), scoring.scale)
        return output.unflatten(0, query.shape[:2])
    has_own_keys = query.shape[0] == key.shape[0] and query.shape[1] <= key.shape[1]
    if documents is None or attended is None or (rehearsal.is_of_shapes() and has_own_keys):
        return _document(query, key, value, scoring)
    if torch.compiler.is_compiling():  # a loop over documents would be recompiled for every batch
        return attend_masked(query, key, value, documents, scoring)
    # One document at a time: no work for masked pairs of tokens, and no mask in memory.
    lengths = documents.lengths, attended.lengths, attended.lengths
    split = [heads.split(each) for heads, each in zip(_flat(query, key, value), lengths, strict=True)]
    outputs = [_document(q[None], k[None], v[None], scoring)[0] for q, k, v in zip(*split, strict=True)]
    return torch.cat(outputs).unflatten(0, query.shape[:2])


def _flat(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten all rows into one."""
    return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)


def _spans(query: Tensor, documents: Documents | None, attended: Documents | Part | None) -> Spans:
    """The spans of the flattened batch. Bounds of lengths are at least 2, since the kernel has another form for 1."""
    if documents is None or attended is None:
        rows, seq = query.shape[:2]
        bounds = torch.arange(0, (rows + 1) * seq, seq, dtype=torch.int32, device=query.device)
        return Spans(bounds, None, max(2, seq), max(2, seq))
    key_bounds = None if documents.part is None else attended.boundaries
    return Spans(documents.boundaries, key_bounds, max(2, documents.longest), max(2, attended.longest))


def attend_masked(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring = PLAIN) -> Tensor:
    """Attention with the full mask `[batch, seq, seq]`, the reference for the other paths.

    For a part of a batch, `key` and `value` are those that its pieces attend to.
    """
    order = torch.arange(query.shape[1], device=query.device)
    if documents.part is None:
        same_document = documents.ids[:, :, None] == documents.ids[:, None, :]
        return _masked(query, key, value, same_document & _visible(order, order, scoring), scoring)
    # A piece and the tokens that it attends to end with the same token.
    keys = torch.arange(key.shape[1], device=key.device)
    query_ends, key_ends = documents.boundaries[1:], documents.part.boundaries[1:]
    of_query = torch.searchsorted(query_ends, order, right=True)
    of_key = torch.searchsorted(key_ends, keys, right=True)
    visible = _visible(order - query_ends[of_query], keys - key_ends[of_key], scoring)
    return _masked(query, key, value, (visible & (of_query[:, None] == of_key))[None], scoring)


def attend_cached(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """Attention of new tokens, `query` `[rows, seq, heads, head_dim]`, to `key`, `value`
    `[rows, kv_heads, slots, head_dim]`. `bias` `[rows, seq, slots]`, fp32, is 0 where they attend, else -inf.

    On a GPU, this is two matrix products: attention kernels gain nothing for one query, and cuDNN makes a new execution
    plan for every number of slots, which takes longer than the step.
    """
    groups = query.shape[2] // key.shape[1]
    # Heads that share a key become several queries of one head, so that keys and values are not repeated.
    shared = (
        query.unflatten(2, (-1, groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    )  # [rows, kv_heads, seq * groups, dim]
    bias = (bias if query.shape[1] == 1 else bias.repeat_interleave(groups, dim=1))[:, None]
    if scoring.is_plain and not query.is_cuda:
        found = F.scaled_dot_product_attention(shared, key, value, bias.to(query.dtype), scale=scoring.scale)
    else:
        scores = _scores(shared, key, bias, scoring)
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(scores.dtype).view(-1, 1, groups).expand(-1, query.shape[1], -1).flatten(1)
            scores = torch.cat([scores, sinks[..., None].expand(len(scores), -1, -1, 1)], dim=-1)
        found = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype) @ value
    return found.unflatten(2, (-1, groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)


def _scores(query: Tensor, key: Tensor, bias: Tensor, scoring: Scoring) -> Tensor:
    """Scores in fp32, `[rows, heads, queries, keys]`, without an fp32 copy of the keys."""
    flat = query.flatten(0, 1), key.flatten(0, 1).mT
    if query.is_cuda and query.dtype != torch.float32:
        scores = torch.bmm(*flat, out_dtype=torch.float32)
    else:
        scores = torch.bmm(*flat).float()
    scores = scores.unflatten(0, query.shape[:2])
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    if scoring.softcap is None:
        return torch.add(bias, scores, alpha=scale)
    return torch.add(bias, torch.tanh(scores * (scale / scoring.softcap)), alpha=scoring.softcap)


def _document(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attention in rows of one document each; the queries may be the last tokens only."""
    length, before = query.shape[1], key.shape[1] - query.shape[1]
    if not before and scoring.is_plain and (scoring.window is None or length <= scoring.window):
        return _sdpa(query, key, value, scoring.scale, is_causal=True)
    # In chunks of queries as long as the window: no work for keys outside of it, and a small mask.
    order = torch.arange(key.shape[1], device=query.device)
    step = scoring.window or length
    outputs = []
    for start in range(before, key.shape[1], step):
        queries = slice(start - before, start - before + step)
        keys = slice(0 if scoring.window is None else max(0, start - step + 1), start + step)
        mask = _visible(order[before:][queries], order[keys], scoring)
        outputs.append(_masked(query[:, queries], key[:, keys], value[:, keys], mask, scoring))
    return torch.cat(outputs, dim=1)


def _visible(query_positions: Tensor, key_positions: Tensor, scoring: Scoring) -> Tensor:
    """The mask `[..., queries, keys]`: true where a query attends to a key."""
    distance = query_positions[..., None] - key_positions
    visible = distance >= 0
    return visible if scoring.window is None else visible & (distance < scoring.window)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Attention with a mask, by SDPA; softcap and sinks need matrix products, with the scores in memory."""
    mask = mask.unsqueeze(-3)  # for all heads
    if scoring.is_plain:
        return _sdpa(query, key, value, scoring.scale, mask)
    groups = query.shape[2] // key.shape[2]
    key, value = (heads.repeat_interleave(groups, dim=2) if groups > 1 else heads for heads in (key, value))
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    on_gpu = capability(query.device) is not None  # also when planning for a GPU
    on_cpu = query.device.type == "cpu" and not on_gpu
    # The backward in bf16 takes four times as long as in fp32.
    slow = on_cpu and query.requires_grad and query.dtype == torch.bfloat16
    q, k, v = (each.transpose(1, 2).to(torch.float32 if slow else each.dtype) for each in (query, key, value))
    grouped = key.shape[2] != query.shape[2]
    if grouped and on_gpu:  # the masked kernel has no groups there: torch would use matrix products
        k, v = (heads.repeat_interleave(query.shape[2] // key.shape[2], dim=1) for heads in (k, v))
        grouped = False
    output = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return output.transpose(1, 2).to(query.dtype)
