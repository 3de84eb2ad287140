"""Metrics that the model gives: the loss on validation data, the accuracy, routing. All processes call them."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tune.collators import Batch
from tune.distributed import World


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


def accuracy(loss_fn: Any, world: World, prefix: str = "") -> dict[str, Tensor]:
    """The metric `token_accuracy` since the last call, if `loss_fn` counts."""
    if not getattr(loss_fn, "accuracy", False):
        return {}
    counts, loss_fn.counts = loss_fn.counts, None
    correct, tokens = world.sum(torch.zeros(2) if counts is None else counts)
    return {f"{prefix}token_accuracy": correct / tokens}


def routing(model: nn.Module, world: World) -> dict[str, Tensor]:
    """The metrics of the experts since the last call; none for other models, NaN if nothing was supervised."""
    sums = getattr(model, "routing", None)
    if sums is None:
        return {}
    rows = world.sum(sums.take())
    load, (entropy, balance, tokens, supervised) = rows[:, :-4], rows[:, -4:].unbind(dim=1)
    return {
        "expert_load": (load.amax(dim=1) / load.mean(dim=1)).mean(),
        "router_entropy": (entropy / tokens).mean(),
        "router_loss": (balance / supervised).mean(),
    }
