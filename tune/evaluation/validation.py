"""Metrics that the model gives: the loss on validation data, the accuracy, routing. All processes call them."""

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
    """Mean loss over all supervised tokens of the `batches` of all processes, and over those of each source.

    `batches` are those of `tune.datasets.validation_batches`; `loss_fn` returns a sum over supervised tokens.
    `world=None` is `tune.distributed.current_world()`.
    """
    device, world = device_of(model, world), current_world(world)

    def measure(batch: Batch) -> dict[str, Tensor]:
        loss = model(batch.to(device), loss_fn)
        return {"loss": torch.stack([loss, torch.full_like(loss, batch.num_supervised * world.is_last_stage)])}

    return world.fetch(**means(validate(model, batches, measure), world), **accuracy(loss_fn, world, "validation_"))


def device_of(model: nn.Module, world: World | None) -> torch.device:
    """The device of the batches of a model. Without a `world`, a model that is not sharded computes where it is."""
    parameter = next(model.parameters(), None)
    if world is not None or parameter is None or isinstance(parameter, DTensor):  # which may rest on the host
        return current_world(world).device
    return parameter.device


@torch.no_grad()
def validate(
    model: nn.Module,
    batches: Iterable[tuple[Iterable[str], Batch]],
    measure: Callable[[Batch], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Add up, without dropout, what `measure` gives for each of this process's `batches`: by metric `[2]`, a sum and of
    how many it is. Metrics are renamed as the loss is, which becomes `validation_loss`, and `validation_loss/SOURCE`
    for each source: `right` becomes `validation_right`, and `right/SOURCE`."""
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


def means(totals: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """The means over all processes of metrics, each of them given as `[2]`: a sum, and of how many."""
    if not totals:
        return {}
    sums = world.sum(torch.stack([*totals.values()]))
    return {name: total / count for name, (total, count) in zip(totals, sums, strict=True)}


def accuracy(loss_fn: Any, world: World, prefix: str = "") -> dict[str, Tensor]:
    """The metric `token_accuracy` since the last call, if `loss_fn` counts. `evaluate` takes the counts of its own."""
    if not getattr(loss_fn, "accuracy", False):
        return {}
    counts, loss_fn.counts = loss_fn.counts, None
    correct, tokens = world.sum_of_parts(torch.zeros(2) if counts is None else counts)
    return {f"{prefix}token_accuracy": correct / tokens}


def routing(model: nn.Module, world: World) -> dict[str, Tensor]:
    """The metrics of the experts in training forwards since the last call; none for other models, NaN if nothing was
    supervised."""
    sums = getattr(model, "routing", None)
    if sums is None:
        return {}
    rows = world.sum(sums.take())
    rows[:, -2:] /= world.num_stages * world.pp_virtual  # each stage counts the tokens of all layers
    load, (entropy, balance, tokens, supervised) = rows[:, :-4], rows[:, -4:].unbind(dim=1)
    return {
        "expert_load": (load.amax(dim=1) / load.mean(dim=1)).mean(),
        "router_entropy": (entropy / tokens).mean(),
        "router_loss": (balance / supervised).mean(),
    }
