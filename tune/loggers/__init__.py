"""Sinks for metrics and messages. Every run has `Files` and `Console`; `logger.trackers` adds others."""

from tune.loggers.sinks import (
    WANDB_OFF,
    Console,
    Files,
    MLflow,
    Sink,
    TensorBoard,
    Trackio,
    WandbOptions,
    WeightsAndBiases,
    lines_after,
    open_sinks,
)

# Other names are internal to `tune`.
__all__ = [
    "MLflow",
    "Sink",
    "TensorBoard",
    "Trackio",
    "WeightsAndBiases",
]
