"""Track the best value of a metric."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tune.errors import TuneError
from tune.lookup import did_you_mean

# The metrics of docs/runs.md for which one direction is better. Others, such as `lr`, have none.
HIGHER = {
    "reward", "rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/chosen", "token_accuracy",
    "tokens_per_second", "supervised_tokens_per_second", "mfu", "all_right_groups",
}  # fmt: skip
LOWER = {
    "loss", "policy_loss", "value_loss", "general_loss", "general_kl", "router_loss", "kl", "mismatch_kl",
    "rewards/rejected", "logps/rejected", "grad_norm", "expert_load", "dead_groups", "all_wrong_groups",
    "truncated_share", "clipped_share", "without_room", "step_seconds", "data_seconds", "save_seconds",
    "rollout_seconds", "slowest_excess", "peak_memory_gib",
}  # fmt: skip


def more_is_better(metric: str, of_tasks: Mapping[str, bool | None], stated: bool | None = None) -> bool | None:
    """Return whether a higher value of a metric is better, or None if that is unknown.

    What is `stated` counts first, then `higher_is_better` of `Tasks`, then the table of the metrics that runs log, in a
    validation and by source too. A name that is only similar decides nothing.
    """
    if stated is not None:
        return stated
    task = metric.rpartition("/")[0]
    if metric in of_tasks or f"{task}/" in of_tasks:
        return of_tasks.get(metric)
    name = metric.removeprefix("validation_")
    while name and name not in HIGHER | LOWER:
        name = name.rpartition("/")[0]  # loss/SOURCE, reward/FUNCTION
    return name in HIGHER if name else None


def unknown_direction(place: str, metric: str, setting: str) -> TuneError:
    """Return the error that the direction of a metric is unknown and that `setting` states it."""
    known = HIGHER | LOWER
    hint = did_you_mean(metric, {*known, *(f"validation_{name}" for name in known)})
    return TuneError(
        f"{place}: it is unknown whether a higher {metric} is better.{hint} For a metric of your own, set {setting} to "
        "true or false"
    )


class Best:
    """The best value of a metric so far. `stale` counts the values since, `taken` is the step of the last value. `kept`
    is the value and step of the best written checkpoint; `values` has all steps whose checkpoints may exist.
    `more_is_better` decides whether the highest or lowest value is best.

    Raises:
        TuneError: the metric has the name of a task's metric, but no task measures it; or it is unknown whether the
            highest or lowest value is best.
    """

    def __init__(
        self,
        metric: str | None,
        patience: int | None,
        higher_is_better: Mapping[str, bool | None],
        stated: bool | None = None,
    ):
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
        is_more_better = more_is_better(wanted, higher_is_better, stated)
        if metric and is_more_better is None:
            raise unknown_direction("checkpointer.keep_best", metric, "checkpointer.higher_is_better")
        if stated is not None and not metric:
            raise TuneError("checkpointer.higher_is_better: it needs a metric. Set checkpointer.keep_best, or unset it")
        self.sign = 1 if is_more_better else -1
        self.value, self.step, self.stale, self.taken = -float("inf"), 0, 0, 0
        self.kept = self.value, self.step
        self.values: dict[int, float] = {}

    @property
    def direction(self) -> str:
        return "highest" if self.sign > 0 else "lowest"

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
        as values that are no better. The value of a step counts once, also if a continued run measures it again."""
        if step <= self.taken:
            return self.step == step
        self.taken = step
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
            names = ("metric", "sign", "stale", "taken") if self.stale else ()
            return {name: getattr(self, name) for name in names}
        state = {name: getattr(self, name) for name in ("metric", "sign", "value", "step", "stale", "taken")}
        return state | {"values": [list(each) for each in sorted(self.values.items())]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state if it is of the same metric and direction."""
        if self.metric and state.get("metric") == self.metric and state.get("sign", self.sign) == self.sign:
            self.stale, self.taken = state["stale"], state.get("taken", 0)
            if "step" not in state:  # no value was finite
                return
            self.value, self.step = state["value"], state["step"]
            self.values = {self.step: self.value} | dict(state.get("values", ()))
            self.kept = self.value, self.step
