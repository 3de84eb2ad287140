"""The loss on validation data."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tune.collators import Batch
from tune.distributed import World
from tune.loggers.accuracy import accuracy


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[tuple[Iterable[str], Batch]], loss_fn: Callable[..., Any], world: World
) -> dict[str, float]:
    """Mean loss over all supervised tokens of the `batches` of all processes, and over those of each source.

    `batches` are those of `tune.datasets.validation_batches`; `loss_fn` returns a sum over supervised tokens.
    """
    model.eval()  # no dropout
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for metrics, batch in batches:
        loss = model(batch.to(world.device), loss_fn)
        for metric in metrics:
            sums[metric] += loss
            counts[metric] += batch.num_supervised
    model.train()
    means = {metric: world.sum(sums[metric]) / world.sum(counts[metric]) for metric in sums}
    return world.fetch(**means, **accuracy(loss_fn, world, "validation_"))
