"""Learning rate schedules: a linear warm-up, then a shape, as a factor on the optimizer's learning rates."""

import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tune.errors import TuneError
from tune.types import PositiveInt, StepsOrFraction, UnitInterval, checked


class Schedule(LambdaLR):
    """torch's LambdaLR with plain numbers as rates and state, even if the optimizer (torchao's) has tensors."""

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        with warnings.catch_warnings():  # if the first step is skipped, the optimizer has not stepped
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before")
            super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["step"]
        # `get_lr` would warn outside `step`.
        for group, rate, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = rate * factor(self.last_epoch)


@checked
def constant(optimizer: Optimizer, total_steps: PositiveInt, warmup: StepsOrFraction = 0) -> Schedule:
    """Keep the learning rate constant after the warm-up."""
    return _schedule(optimizer, total_steps, warmup, lambda progress: 1.0)


@checked
def linear(
    optimizer: Optimizer, total_steps: PositiveInt, warmup: StepsOrFraction = 0, min_ratio: UnitInterval = 0.0
) -> Schedule:
    """Decay linearly to `min_ratio`, reached one step after the last."""
    return _schedule(optimizer, total_steps, warmup, lambda progress: 1 - (1 - min_ratio) * progress)


@checked
def cosine(
    optimizer: Optimizer, total_steps: PositiveInt, warmup: StepsOrFraction = 0, min_ratio: UnitInterval = 0.0
) -> Schedule:
    """Decay along half a cosine to `min_ratio`, reached one step after the last (Loshchilov and Hutter, 2017, without
    restarts)."""

    def shape(progress: float) -> float:
        return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2

    return _schedule(optimizer, total_steps, warmup, shape)


@checked
def warmup_stable_decay(
    optimizer: Optimizer,
    total_steps: PositiveInt,
    warmup: StepsOrFraction = 0,
    decay: UnitInterval = 0.2,
    min_ratio: UnitInterval = 0.0,
) -> Schedule:
    """Stay constant, then decay linearly over the last fraction `decay` of the steps after the warm-up to `min_ratio`,
    reached one step after the last (Hu et al., MiniCPM, 2024)."""

    def shape(progress: float) -> float:
        return 1 - (1 - min_ratio) * max(0.0, progress - (1 - decay)) / max(decay, 1e-12)

    return _schedule(optimizer, total_steps, warmup, shape)


@checked
def inverse_square_root(optimizer: Optimizer, total_steps: PositiveInt, warmup: StepsOrFraction = 0.03) -> Schedule:
    """Decay with the inverse square root of the step after the warm-up (Vaswani et al., 2017)."""
    steps = max(1, _warmup_steps(warmup, total_steps))

    def shape(progress: float) -> float:
        return (steps / (steps + progress * max(1, total_steps - steps))) ** 0.5

    return _schedule(optimizer, total_steps, warmup, shape)


def _warmup_steps(warmup: float, total_steps: int) -> int:
    """Return the warm-up in optimizer steps; `warmup` is a number of steps or, below 1, a fraction of `total_steps`."""
    steps = round(warmup * total_steps) if warmup < 1 else int(warmup)
    if steps > total_steps:
        raise TuneError(f"schedule.warmup: {steps} warm-up steps exceed the run's {total_steps} optimizer steps")
    return steps


def _schedule(optimizer: Optimizer, total_steps: int, warmup: float, shape: Callable[[float], float]) -> Schedule:
    """Build a schedule. `shape` maps progress after the warm-up, 0 to 1, to the factor. Warm-up starts above 0."""
    steps = _warmup_steps(warmup, total_steps)

    def factor(step: int) -> float:
        if step < steps:
            return (step + 1) / (steps + 1)
        return shape(min(1.0, (step - steps) / max(1, total_steps - steps)))

    return Schedule(optimizer, factor)
