"""Detect losses and gradients that are not finite, before they change the weights."""

import math
from collections.abc import Sequence

from tune.errors import TuneError

STOPPED = "training stopped; this step is not saved, earlier checkpoints are intact"
CAUSES = "Usual causes: learning rate too high, damaged weights, or a model that overflows in bf16 or fp16"


def require_finite(step: int, rows: Sequence[int], **values: float) -> None:
    """Stop before ruined weights are saved.

    Raises:
        TuneError: a value is NaN or infinite; names the step and the dataset rows of its batch.
    """
    if found := not_finite(step, rows, values):
        raise TuneError(
            f"{found}: {STOPPED}. {CAUSES}. To continue without such batches, set checkpointer.on_nan=skip or rollback"
        )


def not_finite(step: int, rows: Sequence[int], values: dict[str, float]) -> str:
    """Describe the first value that is NaN or infinite, with its step and dataset rows; "" if all are finite."""
    listing = ", ".join(map(str, rows[:16])) + (", ..." if len(rows) > 16 else "")
    bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    return f"{bad[0]} at step {step}, in a batch of dataset rows {listing}" if bad else ""


def overflows(values: dict[str, float]) -> bool:
    """Whether only the gradient norm is not finite: forward was in range but backward was not."""
    return [name for name, value in values.items() if not math.isfinite(value)] == ["grad_norm"]
