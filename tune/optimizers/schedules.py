"""Schedules: a warm-up from zero, then a shape, as a factor on the optimizer's learning rates."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tune.errors import TuneError
from tune.types import NonNegativeFloat, NonNegativeInt, UnitInterval


def constant(optimizer: Optimizer, total_steps: int, warmup: NonNegativeInt | NonNegativeFloat = 0) -> LambdaLR:
    """The learning rate stays as it is."""
    return _schedule(optimizer, total_steps, warmup, lambda progress: 1.0)


def linear(
    optimizer: Optimizer,
    total_steps: int,
    warmup: NonNegativeInt | NonNegativeFloat = 0,
    min_ratio: UnitInterval = 0.0,
) -> LambdaLR:
    """A straight line down to `min_ratio`."""
    return _schedule(optimizer, total_steps, warmup, lambda progress: 1 - (1 - min_ratio) * progress)


def cosine(
    optimizer: Optimizer,
    total_steps: int,
    warmup: NonNegativeInt | NonNegativeFloat = 0,
    min_ratio: UnitInterval = 0.0,
) -> LambdaLR:
    """Half a cosine down to `min_ratio` (Loshchilov and Hutter, 2017, without restarts)."""
    return _schedule(
        optimizer,
        total_steps,
        warmup,
        lambda progress: min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2,
    )


def _schedule(optimizer: Optimizer, total_steps: int, warmup: float, shape: Callable[[float], float]) -> LambdaLR:
    """`warmup` is a number of optimizer steps or, below 1, a fraction of `total_steps`. No step is at zero."""
    steps = round(warmup * total_steps) if warmup < 1 else int(warmup)
    if steps > total_steps:
        raise TuneError(f"schedule.warmup: {steps} steps of warm-up do not fit into {total_steps} optimizer steps")

    def factor(step: int) -> float:
        if step < steps:
            return (step + 1) / (steps + 1)
        return shape(min(1.0, (step - steps) / max(1, total_steps - steps)))

    return LambdaLR(optimizer, factor)
