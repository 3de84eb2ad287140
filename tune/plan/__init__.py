"""The memory, the time and the best layout of a run, before it starts.

It records a recipe's own step (recording), runs it for shortened models on fake tensors (trace), and derives memory at
each moment (memory) and time by a device's roofline (speed). `layout_of` returns the best layout for the processes of
a run (parallel=auto), `savings` what other settings save, and `longest_rows` the longest rows that fit.
"""

from tune.plan.layout import layout_of
from tune.plan.memory import GIB
from tune.plan.planning import Job, calibrate
from tune.plan.what_fits import longest_rows, savings

# Other names are internal to `tune`.
__all__ = [
    "Job",
    "calibrate",
    "layout_of",
    "longest_rows",
    "savings",
]
