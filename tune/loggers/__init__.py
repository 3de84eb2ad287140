"""Sinks for metrics and messages. Every run has `Files` and `Console`; `trackers` adds others."""

from tune.loggers.sinks import (
    Console,
    Files,
    MLflow,
    Sink,
    TensorBoard,
    Trackio,
    WeightsAndBiases,
    lines_after,
    open_sinks,
)

# Other names are internal to `tune`.
__all__ = [
    "Console",
    "MLflow",
    "Sink",
    "TensorBoard",
    "Trackio",
    "WeightsAndBiases",
]
