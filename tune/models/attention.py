"""Causal attention that stays inside documents, with the fastest kernel that fits and plain SDPA as its oracle."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Where the documents of a batch lie, worked out once per forward and shared by all blocks.

    A document is a run of equal ids in a row of `ids` `[batch, seq]`; `boundaries` are the starts of the documents in
    the flattened batch, closed by its length. `longest` is the length of the longest document, rounded up to a power of
    two: kernels are compiled for it, so it should take few values.
    """

    ids: Tensor
    boundaries: Tensor
    lengths: list[int]
    longest: int

    @classmethod
    def of(cls, documents: Tensor) -> "Segments":
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = starts.flatten().nonzero().flatten()
        boundaries = torch.cat([starts, starts.new_tensor([documents.numel()])])
        lengths = boundaries.diff().tolist()
        return cls(documents, boundaries.int(), lengths, 1 << (max(lengths) - 1).bit_length())


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments | None) -> Tensor:
    """Causal attention of `query` `[batch, seq, heads, head_dim]` to `key`, `value` `[batch, seq, kv_heads, head_dim]`.

    `segments=None` means one document a row. Every path computes what `attend_masked` computes.
    """
    if segments is None:
        return _causal(query, key, value)
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _flash(query, key, value, segments)
    if torch.compiler.is_compiling():  # a loop over documents would be compiled anew for every batch
        return attend_masked(query, key, value, segments)
    # A document at a time: no work on pairs of tokens that must not see each other, and no mask in memory.
    flat = [heads.flatten(0, 1).split(segments.lengths) for heads in (query, key, value)]
    outputs = [_causal(q[None], k[None], v[None])[0] for q, k, v in zip(*flat, strict=True)]
    return torch.cat(outputs).view_as(query)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """The same by SDPA with the full mask `[batch, 1, seq, seq]`: the oracle of the other paths."""
    same_document = segments.ids[:, :, None] == segments.ids[:, None, :]
    return _sdpa(query, key, value, mask=same_document.tril()[:, None])


def attend_cached(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """Attention of new tokens at `positions` `[batch, new]` to a cache whose slot j holds position j."""
    slots = torch.arange(key.shape[1], device=key.device)
    return _sdpa(query, key, value, mask=(slots <= positions[..., None])[:, None])


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _sdpa(query, key, value, is_causal=True)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
    grouped = key.shape[1] != query.shape[1]
    output = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=grouped)
    return output.transpose(1, 2)


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[2] // key.shape[2]
    key, value = (heads.repeat_interleave(groups, dim=2) if groups > 1 else heads for heads in (key, value))
    output = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        cu_seq_q=segments.boundaries,
        cu_seq_k=segments.boundaries,
        max_q=segments.longest,
        max_k=segments.longest,
        window_size=(-1, 0),
    )
    assert isinstance(output, Tensor)  # and not a tuple: no further results were asked for
    return output.view_as(query)
