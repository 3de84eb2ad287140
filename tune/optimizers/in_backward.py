"""Optimizer steps inside backward, so that gradients take little memory."""

import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tune.distributed import World, local_shard, sum_of_squares


class InBackward:
    """Registers hooks by which `optimizer` updates each parameter as soon as its gradient is complete, then frees the
    gradient. `optimizer.step()` then has nothing to do; learning rates and state stay in the optimizer.

    There must be one backward per optimizer step. Gradients cannot be clipped: the norm is known after the updates.
    """

    def __init__(self, optimizer: Optimizer, world: World):
        self.optimizer, self.world = optimizer, world
        self.squares = torch.zeros((), device=world.device)
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._update, index))

    def norm(self) -> Tensor:
        """The norm of all gradients since the last call."""
        squares = self.world.sum_of_parts(self.squares)
        squares /= self.world.mesh["dp_replicate"].size()  # they hold the same
        if self.world.mesh["tp"].size() > 1:
            dist.all_reduce(squares, group=self.world.mesh["tp"].get_group())
        self.squares.zero_()
        return squares.sqrt()

    def _update(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        square = sum_of_squares([local_shard(parameter.grad)[0]])
        has_copies = isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate()  # over tp
        self.squares += square / self.world.mesh["tp"].size() if has_copies else square
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [groups[index] | {"params": [parameter]}]
        self.optimizer.step()
        self.optimizer.param_groups = groups
        parameter.grad = None
