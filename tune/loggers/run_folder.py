"""Choose the run folder, and check that this run can use it."""

import contextlib
import itertools
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path

from tune.atomic import CHECKPOINT
from tune.checkpointers import checkpoint_at
from tune.distributed import World
from tune.distributed.restarts import launcher_store
from tune.errors import TuneError
from tune.loggers.sinks import require_free

PATIENCE = 10.0  # seconds after which another node sees what was written to a shared file system
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "TUNE_RESTART_COUNT")  # the last one: under Ray
_runs = itertools.count()


def choose(output_dir: str | None, recipe: str, world: World) -> str:
    """`output_dir`, or a new folder named by the time. Where torchrun starts the processes again (--max-restarts) it is
    that of the first start: torchrun's store, which outlives the processes, has its name."""
    new, name = f"runs/{recipe}-{datetime.now():%Y%m%d-%H%M%S}", f"tune/output_dir/{next(_runs)}"
    if world.is_main and not output_dir and (store := launcher_store(world.timeout)):
        new = store.compare_set(name, "", new).decode()
    return world.broadcast(output_dir or new)


def resumption(path: Path, resume: str) -> str:
    """`resume`; where a launcher starts the processes again, `auto` once there is a checkpoint."""
    if "://" in resume:
        raise TuneError(f"resume: {resume} is no folder. Continue a run from a URL by output_dir, or fetch it first")
    is_restart = any(os.environ.get(name, "0") != "0" for name in RESTARTS)
    return "auto" if is_restart and any(path.glob(f"checkpoints/{CHECKPOINT}")) else resume


def refusal(path: Path, resume: str, mark: Path, adapts: bool) -> str:
    """Make the folder and the empty file `mark` in it; why the run, which trains an adapter if it `adapts`, cannot use
    it or what it would continue, or nothing."""
    if resume == "never" and ((path / "config.yaml").exists() or (path / "checkpoints").exists()):
        return f"output_dir: {path} holds a run already, and resume=never. Give another output_dir, or resume=auto"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), (path / "log.txt").open("r+", encoding="utf-8") as log:
            require_free(log)
        _require_same_kind(path, resume, adapts)
        mark.touch()
    except OSError as error:
        where = "Give one in a folder that you may write to"
        return f"output_dir: {path} cannot be made or written ({error.strerror}). {where}"
    except TuneError as error:
        return str(error)
    return ""


def continued(path: Path, resume: str, intact: bool = True) -> Path | None:
    """The checkpoint from which a run in the folder `path` goes on, if any. Raises TuneError as `checkpoint_at`."""
    if resume in ("auto", "never"):
        return max(path.glob(f"checkpoints/{CHECKPOINT}"), default=None) if resume == "auto" else None
    return checkpoint_at(Path(resume), intact)


def _require_same_kind(path: Path, resume: str, adapts: bool) -> None:
    found = continued(path, resume, intact=False)
    with contextlib.suppress(OSError, ValueError):  # what is damaged is told when it is read
        if found and ("adapter" in json.loads((found / "state.json").read_text())) != adapts:
            had, has = ("no adapter", "one") if adapts else ("an adapter", "none")
            raise TuneError(
                f"resume: {found} is of another training: it has {had}, and this one trains {has}. Continue with that "
                "recipe and its settings, or give another output_dir"
            )


def require_shared(mark: Path, world: World) -> None:
    """Raises TuneError on all ranks if one does not find the file that rank 0 has made in the run folder."""
    deadline = time.monotonic() + PATIENCE
    while not (found := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    without = sorted({node for node, finds in world.all_gather((socket.gethostname(), found)) if not finds})
    if world.is_main:
        mark.unlink()
        with contextlib.suppress(OSError):  # the run makes it again when it begins
            mark.parent.rmdir()
    if without:
        raise TuneError(
            f"output_dir: {mark.parent} is not one folder for all processes: those on {', '.join(without)} do not find "
            "there what the first one writes. Give a folder on a file system that all nodes share, as an absolute path"
        )
