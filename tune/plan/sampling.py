"""The computations of sampling: prompts that are read together, and the last token of all completions."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tune.collators import Batch
from tune.generation import PREFILL_TOKENS, Sampler


def read_together(prompts: int, length: int) -> int:
    """Return how many of `prompts` with `length` tokens are read at once."""
    return max(1, min(prompts, PREFILL_TOKENS // length))


def read_prompts(sampler: Sampler, model: Any, rows: int, prompts: int, length: int) -> Any:
    """Compute the first tokens of `rows` completions from the prompts that are read together."""
    count = read_together(prompts, length)
    device = next(model.parameters()).device
    cache = model.new_cache(rows + 1, length + sampler.max_new_tokens)
    with unset_fake_temporarily():  # positions are known numbers
        tokens = Batch.of(np.ones((1, count * length), np.int64), documents=np.arange(count).repeat(length)[None])
        cache.start([*range(count)], tokens, device)
    logits = model(tokens, cache=cache)[:, 0].unbind()
    cache.copy([(row % count, row) for row in range(count, rows)])
    return cache, _chosen(sampler, torch.stack([logits[row % count] for row in range(rows)]))


def sample_token(sampler: Sampler, model: Any, rows: int, length: int) -> Any:
    """Compute the last token of `rows` completions for prompts of `length` tokens."""
    capacity, device = length + sampler.max_new_tokens, next(model.parameters()).device
    cache = model.new_cache(rows + 1, capacity)
    with unset_fake_temporarily():
        cache.start([0], one := Batch.of(np.ones((1, 1), np.int64)), device)
    model(one, lambda hidden, *_, **__: hidden, cache=cache)  # creates the cache
    with unset_fake_temporarily():
        positions = torch.full((rows, 1), capacity - 1, device=device)
    cache.extend(positions, capacity)
    logits = model(torch.ones(rows, 1, dtype=torch.int64), positions=positions, cache=cache)[:, 0]
    return cache, _chosen(sampler, logits)


def _chosen(sampler: Sampler, logits: Tensor) -> Any:
    return sampler.choose(logits, torch.zeros(len(logits)))
