"""Losses and gradients that are not finite: the weights must not change by them."""

import math

from tune.errors import TuneError

STOPPED = "stopped, nothing of this step is saved, checkpoints are intact"
CAUSES = "Usual causes: a learning rate too high, damaged weights, dtype=bf16 or fp16 with a model that overflows in it"


def require_finite(step: int, rows: list[int], **values: float) -> None:
    """Stop before ruined weights are saved.

    Raises:
        TuneError: a value is NaN or infinite; names the step and the dataset rows of its batch.
    """
    if found := not_finite(step, rows, values):
        raise TuneError(
            f"{found}: {STOPPED}. {CAUSES}. checkpointer.on_nan=skip or rollback goes on without such batches"
        )


def not_finite(step: int, rows: list[int], values: dict[str, float]) -> str:
    """Which value is NaN or infinite, with its step and the dataset rows of its batch; "" if none is."""
    listing = ", ".join(map(str, rows[:16])) + (", ..." if len(rows) > 16 else "")
    bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    return f"{bad[0]} at step {step}, of a batch of the dataset rows {listing}" if bad else ""


def overflows(values: dict[str, float]) -> bool:
    """Whether all but the norm of the gradients is finite: forward was in range, and backward was not."""
    return [name for name, value in values.items() if not math.isfinite(value)] == ["grad_norm"]
