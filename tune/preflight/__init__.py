"""Told before the run.

validate: what is wrong with it. A check is the function that the run itself calls; a rule goes to `tune.rules`.
migrate: settings of ours from configs of other libraries; their words are tables in `peers/`.
plan: memory, time and the best layout, from what a recipe computes (objectives) of shortened models on fake tensors
(trace), by moments (memory) and by the roofline (speed) of a device.
layout: of that the best, for the processes of a run (parallel=auto).
"""

from tune.preflight.layout import layout_of
