"""Track the best value of a metric."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tune.errors import TuneError
from tune.lookup import did_you_mean

# Patterns in the names of metrics for which lower is better; docs/runs.md lists all metrics.
LESS = re.compile(
    r"loss|perplexity|bits_per_byte|(^|_)kl\b|rejected|seconds|memory|_share\b|dead_groups|all_wrong|without_room|grad_norm"
    r"|expert_load|slowest"
)


def more_is_better(metric: str, higher_is_better: Mapping[str, bool | None]) -> bool:
    """Whether a higher value of a metric is better. `higher_is_better` of `Tasks` decides for metrics of tasks; without
    an entry, the name of the metric decides."""
    told = higher_is_better.get(metric)
    if told is not None:
        return told
    is_reward = re.match(r"(validation_)?reward(/|$)", metric) is not None  # whatever its function is called
    return is_reward or not LESS.search(metric)


class Best:
    """The best value of a metric so far. `stale` counts the values since. `kept` is the value and step of the best
    written checkpoint; `values` has all steps whose checkpoints may exist. `more_is_better` decides whether the
    highest or lowest value is best.

    Raises:
        TuneError: the metric has the name of a task's metric, but no task measures it.
    """

    def __init__(self, metric: str | None, patience: int | None, higher_is_better: Mapping[str, bool | None]):
        self.metric, self.patience = metric, patience
        wanted = metric or ""
        task = f"{wanted.rpartition('/')[0]}/"
        is_of_task = "/" in wanted and not wanted.startswith("validation_")
        if higher_is_better and is_of_task and not {wanted, task} & higher_is_better.keys():
            there = [name for name in higher_is_better if name.startswith(task)]
            there = there or [*dict.fromkeys(f"{name.rpartition('/')[0]}/..." for name in higher_is_better)]
            hint = did_you_mean(wanted, higher_is_better)
            raise TuneError(
                f"checkpointer.keep_best: no task measures {wanted}.{hint} Available: {', '.join(sorted(there))}"
            )
        self.sign = 1 if more_is_better(wanted, higher_is_better) else -1
        self.value, self.step, self.stale = -float("inf"), 0, 0
        self.kept = self.value, self.step
        self.values: dict[int, float] = {}

    def __str__(self) -> str:
        return f"{self.metric}, {self.value * self.sign:.4g} at step {self.step}"

    def is_in(self, metrics: Iterable[str]) -> bool:
        """Whether the metric is in `metrics`. Raises TuneError if its validation or task ran without measuring it."""
        wanted = self.metric or ""
        prefix = "validation_" if wanted.startswith("validation_") else wanted.rpartition("/")[0] + "/"
        found = ", ".join(name for name in metrics if name.startswith(prefix))
        if wanted and found and wanted not in metrics:
            what = "a validation" if prefix == "validation_" else f"the task {prefix[:-1]}"
            hint = did_you_mean(wanted, metrics)
            raise TuneError(f"checkpointer.keep_best: {what} does not measure {wanted}, only {found}.{hint}")
        return wanted in metrics

    def take(self, step: int, value: float) -> bool:
        """Record the metric of a step, and return whether it is the best so far. NaN and infinity never are: they count
        as values that are no better."""
        is_finite = math.isfinite(value)
        if is_finite:
            self.values[step] = value * self.sign
        if is_finite and value * self.sign > self.value:
            self.value, self.step, self.stale = value * self.sign, step, 0
        else:
            self.stale += 1
        return self.stale == 0

    def forget(self, step: int) -> None:
        """Forget a step whose checkpoint could not be written; if it was the best, restore the previous best."""
        self.values.pop(step, None)
        if self.step == step:
            self.value, self.step = self.kept

    def choose(self, there: Collection[int]) -> None:
        """Forget the values of steps that are not `there`, and choose the best of the rest."""
        self.values = {step: value for step, value in self.values.items() if step in there}
        if self.step not in there:
            self.step = min(self.values, key=lambda step: (-self.values[step], step), default=0)
            self.value = self.values.get(self.step, -float("inf"))
            self.kept = self.value, self.step

    @property
    def is_over(self) -> bool:
        return self.patience is not None and self.stale >= self.patience

    def state_dict(self) -> dict[str, Any]:
        if not self.step:
            return {"metric": self.metric, "stale": self.stale} if self.stale else {}
        state = {name: getattr(self, name) for name in ("metric", "value", "step", "stale")}
        return state | {"values": [list(each) for each in sorted(self.values.items())]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state if it is of the same metric."""
        if self.metric and state.get("metric") == self.metric:
            self.stale = state["stale"]
            if "step" not in state:  # no value was finite
                return
            self.value, self.step = state["value"], state["step"]
            self.values = {self.step: self.value} | dict(state.get("values", ()))
            self.kept = self.value, self.step
