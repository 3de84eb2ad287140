"""GPU flash kernels for tests on a CPU: torch's operators by the formulas of the paper (Dao, 2023), in fp32, or in fp64
for fp64 inputs."""

from contextlib import contextmanager
from unittest import mock

import torch

from tune.models import attention, layers


def visible(query_bounds, key_bounds, left):
    """Return a mask `[queries, keys]` within documents; with fewer queries, the last query sees the last key."""
    query, key = torch.arange(query_bounds[-1]), torch.arange(key_bounds[-1])
    of_query, of_key = (
        torch.searchsorted(b[1:].long(), at, right=True) for b, at in ((query_bounds, query), (key_bounds, key))
    )
    distance = (query - query_bounds[1:][of_query])[:, None] - (key - key_bounds[1:][of_key])
    seen = (of_query[:, None] == of_key) & (distance >= 0)
    return seen if left < 0 else seen & (distance <= left)


def scores_of(query, key, query_bounds, key_bounds, scale, left):
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * scale
    return scores.masked_fill(~visible(query_bounds, key_bounds, left), float("-inf")), groups, scale


def forward(
    query, key, value, query_bounds, key_bounds, most_queries, most_keys, dropout, is_causal, debug, *, scale=None,
    window_size_left=None, window_size_right=None, **others,
):  # fmt: skip
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.ndim == 3
    assert query.shape[-1] * query.itemsize % 16 == 0
    assert is_causal == (window_size_left == -1) and window_size_right == 0 and not dropout
    assert query_bounds.diff().max() <= most_queries > 1 and key_bounds.diff().max() <= most_keys > 1
    exact, dtype = torch.promote_types(query.dtype, torch.float32), query.dtype
    query, key, value = query.to(exact), key.to(exact), value.to(exact)
    scores, groups, _ = scores_of(query, key, query_bounds, key_bounds, scale, window_size_left)
    log_sum = scores.logsumexp(-1)
    output = torch.einsum("hqk,khd->qhd", (scores - log_sum[..., None]).exp(), value.repeat_interleave(groups, 1))
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return output.to(dtype), log_sum, *state, query.new_zeros(0)


def backward(
    gradient, query, key, value, output, log_sum, query_bounds, key_bounds, most_queries, most_keys, dropout,
    is_causal, seed, offset, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """Compute gradients from the given output and log_sum, as the kernel does."""
    dtype = query.dtype
    gradient, query, key, value, output = (each.to(log_sum.dtype) for each in (gradient, query, key, value, output))
    scores, groups, scale = scores_of(query, key, query_bounds, key_bounds, scale, window_size_left)
    weights = (scores - log_sum[..., None]).exp()
    of_weights = torch.einsum("qhd,khd->hqk", gradient, value.repeat_interleave(groups, 1))
    of_scores = weights * (of_weights - (gradient * output).sum(-1).T[..., None]) * scale
    of_query = torch.einsum("hqk,khd->qhd", of_scores, key.repeat_interleave(groups, 1))
    of_key = torch.einsum("hqk,qhd->khd", of_scores, query).unflatten(1, (-1, groups)).sum(2)
    of_value = torch.einsum("hqk,qhd->khd", weights, gradient).unflatten(1, (-1, groups)).sum(2)
    return of_query.to(dtype), of_key.to(dtype), of_value.to(dtype)


def efficient_forward(
    query, key, value, bias, query_bounds, key_bounds, most_queries, most_keys, dropout, causality, keeps_log_sum, *,
    scale=None, **others,
):  # fmt: skip
    """Compute the memory-efficient kernel without gradients."""
    assert all(heads.shape[-1] * heads.itemsize % 16 == 0 and len(heads) == 1 for heads in (query, key, value))
    assert query.shape[2] == key.shape[2] == value.shape[2] and (bias, dropout, causality) == (None, 0, 2)
    scores, *_ = scores_of(query[0], key[0], query_bounds, key_bounds, scale, -1)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[0])
    return output[None], scores.logsumexp(-1)[None], *state, most_queries, most_keys


@contextmanager
def flash_path():
    """Use flash attention for attention without soft caps on any device, even `meta`, where torch knows shapes."""

    def choose(*args, softcap=False, sinks=False):
        return attention.Choice("math" if softcap else "flash")

    with mock.patch.object(attention, "choose", choose), mock.patch.object(layers, "choose", choose):
        yield


@contextmanager
def flash_on_cpu():
    """Use `forward` and `backward` for attention without soft caps, and provide the memory-efficient kernel."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", efficient_forward, "CPU")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        with flash_path():
            yield
    finally:
        library._destroy()
