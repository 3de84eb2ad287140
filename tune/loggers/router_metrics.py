"""What the routers of a model with experts did."""

import torch
from torch import nn

from tune.distributed import World


def routing(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """The metrics of the experts since the last call, over all processes: all must call it. None for other models; NaN
    if nothing was supervised."""
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
