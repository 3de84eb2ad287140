"""Trace a step of each process: `traced.py FOLDER HOSTS`. If HOSTS is `several`, each process has its own clock."""

import sys
import time
from pathlib import Path

import torch

from tune import distributed
from tune.run import profile, profiler

folder, hosts = Path(sys.argv[1]), sys.argv[2]
world = distributed.init("cpu")
fast = 0 if hosts == "one" else 3600e9 * world.rank  # hours, in nanoseconds
if fast:
    now, export = time.time_ns, torch.profiler.profile.export_chrome_trace
    time.time_ns = lambda: now() + int(fast)
    profiler._kernel = lambda: f"kernel {world.rank}"

    def exported(self, path):
        export(self, path)
        text = Path(path).read_text()
        base = text.split('"baseTimeNanoseconds": ')[1].split(",")[0]
        Path(path).write_text(text.replace(f": {base},", f": {int(base) + int(fast)},"))

    torch.profiler.profile.export_chrome_trace = exported
world.barrier()
if world.is_main:
    folder.parent.mkdir(exist_ok=True)
for _ in profile(((step, None) for step in (1, 2)), folder, world, start=2, steps=1):
    layer = torch.nn.Linear(8, 8)
    layer(torch.ones(4, 8)).sum().backward()
    world.barrier()
    with torch.profiler.record_function("after the barrier"):
        pass
world.finish()
