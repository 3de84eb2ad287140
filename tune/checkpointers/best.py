"""The best value of a metric in a training."""

from typing import Any


class Best:
    """The best value of a metric so far; `stale` counts those since. `kept` are value and step of the best one whose
    checkpoint is written. The lowest is the best of a loss and of a metric that is not `higher_is_better`."""

    def __init__(self, metric: str | None, patience: int | None, higher_is_better: bool | None = None):
        self.metric, self.patience = metric, patience
        if higher_is_better is None:
            higher_is_better = not any(word in (metric or "") for word in ("loss", "perplexity", "bits_per_byte"))
        self.sign = 1 if higher_is_better else -1
        self.value, self.step, self.stale = -float("inf"), 0, 0
        self.kept = self.value, self.step

    def __str__(self) -> str:
        return f"{self.metric}, {self.value * self.sign:.4g} at step {self.step}"

    def take(self, step: int, value: float) -> bool:
        """Whether the metric of a step is the best so far. NaN is not."""
        if value * self.sign > self.value:
            self.value, self.step, self.stale = value * self.sign, step, 0
        else:
            self.stale += 1
        return self.stale == 0

    def forget(self, step: int) -> None:
        """The checkpoint of a step could not be written: if it was the best, the one before it is again."""
        if self.step == step:
            self.value, self.step = self.kept

    @property
    def is_over(self) -> bool:
        return self.patience is not None and self.stale >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("metric", "value", "step", "stale")} if self.step else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores nothing from the state of another metric."""
        if state.get("metric") == self.metric:
            vars(self).update(state)
            self.kept = self.value, self.step
