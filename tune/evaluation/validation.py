"""Metrics from the model's forwards: validation loss, accuracy, routing. All processes must call these functions."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tune.collators import Batch
from tune.distributed import World, current_world


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Iterable[str], Batch]],
    loss_fn: Callable[..., Any],
    world: World | None = None,
) -> dict[str, float]:
    """Return the mean loss over all supervised tokens of the `batches` of all processes, in total and by source.

    `batches` come from `tune.datasets.validation_batches`; `loss_fn` returns a sum over supervised tokens. `world=None`
    uses `tune.distributed.current_world()`.
    """
    device, world = device_of(model, world), current_world(world)

    def measure(batch: Batch) -> dict[str, Tensor]:
        loss = model(batch.to(device), loss_fn)
        return {"loss": torch.stack([loss, torch.full_like(loss, batch.num_supervised)])}

    return world.fetch(**world.means(validate(model, batches, measure)), **accuracy(loss_fn, world, "validation_"))


def device_of(model: nn.Module, world: World | None) -> torch.device:
    """Return the device for a model's batches. Without a `world`, a model that is not sharded computes where it is."""
    parameter = next(model.parameters(), None)
    if world is not None or parameter is None or isinstance(parameter, DTensor):  # a DTensor may be on the host
        return current_world(world).device
    return parameter.device


@torch.no_grad()
def validate(
    model: nn.Module,
    batches: Iterable[tuple[Iterable[str], Batch]],
    measure: Callable[[Batch], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Sum the results of `measure` over this process's `batches`, without dropout: (sum, count) `[2]` by metric.
    Metrics are renamed like the loss, which becomes `validation_loss`, and `validation_loss/SOURCE` for each source:
    `right` becomes `validation_right`, and `right/SOURCE`."""
    model.eval()  # no dropout
    totals: dict[str, Tensor] = {}
    for names, batch in batches:
        for metric, value in measure(batch).items():
            add(totals, {name.replace("loss", metric, 1): value for name in names})
    model.train()
    return totals


def add(totals: dict[str, Tensor], measured: Mapping[str, Tensor]) -> None:
    """Add detached sums to `totals`, by metric."""
    for name, value in measured.items():
        totals[name] = totals.get(name, 0) + value.detach()


def accuracy(loss_fn: Any, world: World, prefix: str = "") -> dict[str, Tensor]:
    """Return the metric `token_accuracy` since the last call, if `loss_fn` counts it. `evaluate` also calls this."""
    if not getattr(loss_fn, "accuracy", False):
        return {}
    counts, loss_fn.counts = loss_fn.counts, None
    correct, tokens = world.sum_of_parts(torch.zeros(2) if counts is None else counts)
    return {f"{prefix}token_accuracy": correct / tokens}


def routing(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Return metrics of experts in training forwards since the last call; empty for models without experts, and without
    such a forward, NaN if nothing was supervised."""
    sums = getattr(model, "routing", None)
    if sums is None or sums.rows is None:
        return {}
    # Each stage has rows for its own layers, and the tokens of all. Each rank of cp has the sums of the whole batch:
    # they are counted `cp` times in all columns, of which only ratios are used.
    rows = world.sum_of_parts(sums.take())
    rows[:, -2:] /= world.num_stages * world.pp_virtual
    load, (entropy, balance, tokens, supervised) = rows[:, :-4], rows[:, -4:].unbind(dim=1)
    return {
        "expert_load": (load.amax(dim=1) / load.mean(dim=1)).mean(),
        "router_entropy": (entropy / tokens).mean(),
        "router_loss": (balance / supervised).mean(),
    }
