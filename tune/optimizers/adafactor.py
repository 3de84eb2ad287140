"""Adafactor for sharded parameters."""

from collections.abc import Callable

import torch
from torch import nn

from tune.distributed import full_tensor, local_shard


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor (Shazeer and Stern, 2018) does not support DTensors: here one parameter at a time is gathered
    and updated on all processes."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    whole = nn.Parameter(full_tensor(parameter.detach()))
                    whole.grad = full_tensor(parameter.grad)
                    self.state[whole] = self.state.pop(parameter, {})
                    self.param_groups = [group | {"params": [whole]}]
                    super().step()
                    self.state[parameter] = self.state.pop(whole)
                    shard, where = local_shard(parameter)
                    shard.copy_(whole[where])
        self.param_groups = groups
