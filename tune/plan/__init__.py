"""The memory, the time and the best layout of a run, before it starts.

They follow from what a recipe's own step (recording) computes of shortened models on fake tensors (trace), by moments
(memory) and by the roofline (speed) of a device. `layout_of` takes the best one for the processes of a run
(parallel=auto).
"""

from tune.plan.layout import layout_of
from tune.plan.memory import GIB
from tune.plan.planning import Job, calibrate

# Other names are for the packages of `tune` alone.
__all__ = [
    "Job",
    "calibrate",
    "layout_of",
]
