"""What the routers of a model with experts did."""

import torch
from torch import nn

from tune.distributed import World


def routing(model: nn.Module, world: World) -> dict[str, float]:
    """The metrics of the experts since the last call, over all processes: all must call it. None for other models."""
    sums = getattr(model, "routing", None)
    if sums is None:
        return {}
    rows = sums.take()
    rows = torch.tensor(world.sum(*rows.flatten().tolist())).view(rows.shape)
    load, (entropy, balance, tokens, supervised) = rows[:, :-4], rows[:, -4:].unbind(dim=1)
    if not supervised[0]:
        return {}
    return {
        "expert_load": (load.amax(dim=1) / load.mean(dim=1)).mean().item(),
        "router_entropy": (entropy / tokens).mean().item(),
        "router_loss": (balance / supervised).mean().item(),
    }
