"""Starts scripts without the seconds that imports take: each runs in a fork of this process, which has only imported.

It reads a line of JSON for each, runs it as `python script` would, and prints its exit code when it has ended.
"""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "tune.checkpointers",
    "tune.datasets",
    "tune.evaluation",
    "tune.generation",
    "tune.loggers",
    "tune.losses",
    "tune.optimizers",
    "tune.peft",
    "tune.quantization",
    "tune.run",
)


def share_a_device() -> None:
    """For all groups of gloo. Each would have its own, whose thread looks a hundred times a second for what has come:
    where a script makes hundreds of groups, that takes most of the time."""
    from torch.distributed import distributed_c10d

    gloo = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class Sharing(gloo):
        def __init__(self, store, rank, size, timeout, **_):  # torch 2.14 gives what a plain group does not need
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing


def become(script: str, arguments: list[str], output: str, env: dict[str, str], cwd: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    old, new = (each.get("PYTHONPATH", "").split(os.pathsep) for each in (os.environ, env))
    installed = [path for path in sys.path[1:] if path not in old]
    sys.path[:] = [str(Path(script).parent), *filter(None, new), *installed]
    sys.argv = [script, *arguments]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    share_a_device()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            become(**json.loads(line))
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
