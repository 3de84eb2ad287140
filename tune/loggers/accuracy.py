"""How often the model is right."""

from typing import Any

import torch
from torch import Tensor

from tune.distributed import World


def accuracy(loss_fn: Any, world: World, prefix: str = "") -> dict[str, Tensor]:
    """The metric `token_accuracy` over all processes since the last call, if `loss_fn` counts: all must call it."""
    if not getattr(loss_fn, "accuracy", False):
        return {}
    counts, loss_fn.counts = loss_fn.counts, None
    correct, tokens = world.sum(torch.zeros(2) if counts is None else counts)
    return {f"{prefix}token_accuracy": correct / tokens}
