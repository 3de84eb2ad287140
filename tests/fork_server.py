"""Start scripts without the seconds that imports take: each script runs in a fork of this process after its imports.

The server reads a line of JSON for each script, runs the script as `python script` would, and prints its rank and exit
code when it ends. Scripts may run at the same time.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

# Thresholds of garbage collection: the usual ones spend a seventh of the tests' processor time among imported objects.
RARELY = (20_000, 20, 20)
# Modules that recipes and commands import at the start or later.
IMPORTED = (
    "numpy.lib._npyio_impl",
    "torch._dynamo",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.flop_counter",
    "torch.utils.serialization",
    "tune.checkpointers",
    "tune.cli",
    "tune.datasets",
    "tune.evaluation",
    "tune.generation",
    "tune.loggers",
    "tune.losses",
    "tune.optimizers",
    "tune.peft",
    "tune.plan",
    "tune.quantization",
    "tune.records.page",
    "tune.run",
)


def prepare() -> None:
    """Import, and compile the template of report.html, which every run needs at its end. Freeze this memory for the
    forks: their garbage collection would otherwise copy it page by page."""
    for name in IMPORTED:
        importlib.import_module(name)
    sys.modules["tune.records.page"].TEMPLATES.get_template("report.html")
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


def share_a_device() -> None:
    """Share one device among all gloo groups. Otherwise each group has its own, whose thread polls a hundred times a
    second: in a script with hundreds of groups, that takes most of the time."""
    from torch.distributed import distributed_c10d

    gloo = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class Sharing(gloo):
        def __init__(
            self, store, rank, size, timeout, **_
        ):  # torch 2.14 passes arguments that a plain group does not need
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


def start(job: dict) -> bool:
    """Start the script in a fork of a fork, which waits for it; True in the script's process."""
    if os.fork():
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (script := os.fork()):
        return True
    code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
    os.write(1, f"{job['env']['RANK']} {code}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the intermediate forks
    for line in sys.stdin:
        job = json.loads(line)
        if start(job):
            become(**job)
            break
