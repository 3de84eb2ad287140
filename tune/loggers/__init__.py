"""Metrics and the sinks that take them."""

from tune.loggers.sinks import WANDB_OFF, Console, Files, Sink, WandbOptions, lines_after, open_sinks, require_installed

# Other names are for the packages of `tune` alone.
__all__ = [
    "Sink",
]
