"""A run: its folder, its lock, its messages and metrics, its clocks and its watchdog."""

from tune.run.flops import flops_per_token
from tune.run.hardware import disk_note, planned_memory, size_in_words
from tune.run.profiler import profile
from tune.run.training_run import Run, require_scalars, seed_generators

# Other names are internal to `tune`.
__all__ = [
    "Run",
    "flops_per_token",
    "profile",
]
