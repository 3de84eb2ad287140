"""FlashAttention for packed documents, also with sinks, and the memory-efficient kernel for other cases.

Both are PyTorch's own kernels. A batch is one run of tokens, and `Spans` has the starts of its documents. Nothing is
padded, no scores are in memory, and new lengths do not need new execution plans, as cuDNN's kernels do.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Spans(NamedTuple):
    """The starts of documents in queries and in keys, int32 `[documents + 1]`, and upper bounds of their lengths.

    If a document has fewer queries than keys, its last query attends to its last key. `key_bounds=None` is equal to
    `query_bounds`; compilers do not accept a tensor twice.
    """

    query_bounds: Tensor
    key_bounds: Tensor | None
    most_queries: int
    most_keys: int

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int]:
        """The arguments of the kernels."""
        key_bounds = self.query_bounds if self.key_bounds is None else self.key_bounds
        return self.query_bounds, key_bounds, self.most_queries, self.most_keys


def flash(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None = None, window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`query` `[tokens, heads, size]`, `key`, `value` `[keys, kv_heads, size]` -> `[tokens, heads, value size]`.

    Heads that share keys are not repeated. The kernel needs one head size, a multiple of 8: smaller heads are padded
    with zeros.
    """
    width, size = value.shape[-1], _aligned(query.shape[-1], query.dtype)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (_filled(heads, size) for heads in (query, key, value))
    if sinks is None:
        output = _forward(query, key, value, spans, scale, window)[0]
    else:
        output = FlashWithSinks.apply(query, key, value, sinks, *spans, scale, window)
    return output[..., :width]


def with_sinks(output: Tensor, log_sum: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add to the result of attention one more key, which has a score but no value.

    `log_sum` is the logarithm of the sum of the exponentials of a query's scores. The weight of each key is multiplied
    by exp(log_sum) / (exp(log_sum) + exp(sink)).

    `output` `[tokens, heads, size]`, `log_sum` fp32 `[heads, tokens]`, `sinks` `[heads]` -> output and log_sum.
    """
    total = torch.logaddexp(log_sum, sinks.to(log_sum.dtype)[:, None])
    return (output * (log_sum - total).exp().mT[..., None]).to(output.dtype), total


class FlashWithSinks(torch.autograd.Function):
    """Exact attention with sinks, using kernels that do not support sinks.

    The backward of FlashAttention recomputes the weights P = exp(scores - log_sum), and with D = sum(gradient * output)
    the gradients of the scores, P * (gradient @ value - D). Given the output and log_sum of attention with sinks, both
    are right for attention with one more key. The gradient of that key's score is -P * D, since it has no value.
    """

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, query_bounds: Tensor,
        key_bounds: Tensor | None, most_queries: int, most_keys: int, scale: float | None, window: int | None,
    ) -> Tensor:  # fmt: skip
        spans = Spans(query_bounds, key_bounds, most_queries, most_keys)
        output, log_sum, seed, offset, _ = _forward(query, key, value, spans, scale, window)
        output, total = with_sinks(output, log_sum, sinks)
        context.save_for_backward(query, key, value, sinks, query_bounds, key_bounds, output, total, seed, offset)
        context.most, context.scale, context.window = (most_queries, most_keys), scale, window
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        query, key, value, sinks, query_bounds, key_bounds, output, total, seed, offset = context.saved_tensors
        spans = Spans(query_bounds, key_bounds, *context.most)
        gradients = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, output, total, *spans.arguments, 0.0, context.window is None, seed, offset,
            scale=context.scale, **_window(context.window),
        )  # fmt: skip
        summed = (gradient.to(total.dtype) * output).sum(-1).mT
        weights = (sinks.to(total.dtype)[:, None] - total).exp()
        return *gradients, -(weights * summed).sum(1).to(sinks.dtype), *[None] * 6


def efficient(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None = None) -> Tensor:
    """Like `flash`, for all dtypes, sizes and GPUs, but about half as fast, and without windows, which PyTorch ignores
    in gradients."""
    groups, width = query.shape[1] // key.shape[1], value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if groups > 1:  # this kernel does not support groups
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    query, key, value = (_filled(heads, _aligned(heads.shape[-1], heads.dtype)) for heads in (query, key, value))
    from_last = 2  # causal, where the last query of a document attends to its last key
    spans = spans._replace(
        most_queries=min(spans.most_queries, len(query)), most_keys=min(spans.most_keys, len(key))
    )  # its backward rejects larger bounds
    output, *_ = torch.ops.aten._efficient_attention_forward(
        query[None], key[None], value[None], None, *spans.arguments, 0.0, from_last, True, scale=scale
    )
    return output[0, ..., :width]


def _aligned(size: int, dtype: torch.dtype) -> int:
    """The size rounded up to 16 bytes, which kernels read at once; they reject other head sizes."""
    return size + -size % (16 // dtype.itemsize)


def _filled(heads: Tensor, size: int) -> Tensor:
    """`heads` padded with zeros to `size`, which does not change scores and adds zeros to the output."""
    return heads if heads.shape[-1] == size else F.pad(heads, (0, size - heads.shape[-1]))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None, window: int | None
) -> tuple[Tensor, ...]:
    """The output, log_sum `[heads, tokens]`, and three tensors for dropout and for tests of the kernel."""
    return torch.ops.aten._flash_attention_forward(
        query, key, value, *spans.arguments, 0.0, window is None, False, scale=scale, **_window(window)
    )


def _window(window: int | None) -> dict[str, int]:
    """The number of keys that a query sees before and after its own; -1: all."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
