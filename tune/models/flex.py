"""FlexAttention: attention with bounded scores on GPUs, compiled by torch for a model's heads.

It skips blocks of 128 x 128 scores in which nothing is visible. The mask is made once for all layers of a forward; its
time and memory do not grow with the square of the length.
"""

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tune.collators import Documents
from tune.models.flash import with_sinks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries and keys per block
KINDS = 64  # kinds of calls that the compiler may specialize for; torch's own limit is 8


def block_mask(documents: Documents | None, window: int | None, shape: torch.Size, device: torch.device) -> "BlockMask":
    """The blocks of queries and keys that are partly or fully visible, in a batch of `shape` `[rows, seq]`.

    Each query sees a contiguous range of keys, whose first and last key grow with the query. So the first and the last
    query of a block decide.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first, last, num_keys = visible_keys(documents, window, shape, device)
    num_queries = len(first)
    begins = torch.arange(0, num_queries, BLOCK, device=device)
    ends = (begins + BLOCK).clamp(max=num_queries) - 1
    keys = torch.arange(0, num_keys, BLOCK, device=device)
    is_touched = (keys <= last[ends, None]) & (keys + BLOCK > first[begins, None])
    is_full = (keys >= first[ends, None]) & (keys + BLOCK <= last[begins, None] + 1)
    is_full &= begins[:, None] + BLOCK <= num_queries  # a last block that is not full needs the mask

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= last[query])

    return BlockMask.from_kv_blocks(
        *_ordered(is_touched & ~is_full), *_ordered(is_full), BLOCK_SIZE=BLOCK, mask_mod=is_visible,
        seq_lengths=(num_queries, num_keys),
    )  # fmt: skip


def visible_keys(
    documents: Documents | None, window: int | None, shape: torch.Size, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """The first and the last key that each query of the flattened batch sees, int32 `[tokens]`, and the number of keys
    of the batch."""
    num_queries = num_keys = shape.numel()
    order = torch.arange(num_queries, dtype=torch.int32, device=device)
    if documents is None:
        first, last = order // shape[1] * shape[1], order
    else:
        attended = documents if documents.part is None else documents.part
        num_keys = sum(attended.lengths)
        document = torch.searchsorted(documents.boundaries[1:], order, right=True)
        first = attended.boundaries[document]
        last = order - documents.boundaries[1:][document] + attended.boundaries[1:][document]
    if window is not None:
        first = torch.maximum(first, last - window + 1)
    return first, last, num_keys


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of key blocks for each query block, and their indices, those first; both with batch and heads of 1."""
    which = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], which.int()[None, None]


def flex(
    query: Tensor, key: Tensor, value: Tensor, mask: "BlockMask", scale: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`query` `[tokens, heads, size]`, `key`, `value` `[keys, kv_heads, size]` -> `[tokens, heads, value size]`.
    `mask` is for the flattened batch."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    function: Any = flex_attention if torch.compiler.is_compiling() else _run
    found = function(
        *(heads.transpose(0, 1)[None] for heads in (query, key, value)),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # not the decoding kernel, even for few queries
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return found[0].transpose(0, 1)
    output, more = found
    return with_sinks(output[0].transpose(0, 1), more.lse[0], sinks)[0]


def _run(*heads: Tensor, **options: Any) -> Any:
    """Run compiled where compilation is otherwise off: without gradients, and in selective recomputation, whose
    dispatch mode would run it without a kernel."""
    with torch.compiler.set_stance("default"), _disable_current_modes():
        return _compiled()(*heads, **options)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS)
    return torch.compile(flex_attention, fullgraph=True)


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


RUNS: dict[Any, bool] = {}  # kind of attention -> whether the device can compute it, tried at first use


def runs(mask: "BlockMask", config: Any, dtype: torch.dtype) -> bool:
    """Whether the device of `mask` can compute attention of this config, forward and backward.

    It needs a compiler, and kernels may need more shared memory than the device has. This is tried once, on zeros with
    the shape of the batch, so that the model uses the same compiled code.
    """
    device = mask.kv_num_blocks.device
    kind = config, device, dtype, torch.is_grad_enabled()
    if kind not in RUNS:
        queries, keys = mask.seq_lengths
        shapes = (queries, config.num_heads), (keys, config.num_kv_heads), (keys, config.num_kv_heads)
        query, key, value = (
            torch.zeros(*shape, config.head_dim, dtype=dtype, device=device, requires_grad=True) for shape in shapes
        )
        sinks = torch.zeros(config.num_heads, dtype=dtype, device=device) if config.sinks else None
        try:
            output = flex(query, key, value, mask, config.scale, config.softcap, sinks)
            if output.requires_grad:
                output.sum().backward()
            RUNS[kind] = True
        except torch.OutOfMemoryError:  # says nothing about the kind: the run lacks memory for this batch
            raise
        except Exception as error:  # any error of the compiler, Triton or the driver means the slower path
            reason = str(error).strip().splitlines()[0][:300] if str(error) else type(error).__name__
            warnings.warn(
                f"FlexAttention does not run here ({reason}): attention of this model keeps its scores in memory, "
                "which takes more time and memory",
                stacklevel=2,
            )
            RUNS[kind] = False
    return RUNS[kind]
