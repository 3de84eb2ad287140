"""Choose the run folder, and check that this run can use it."""

import contextlib
import glob
import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tune import records
from tune.checkpointers import checkpoint_at, sampled_digest
from tune.distributed import World, launcher_store
from tune.errors import TuneError
from tune.files import ADAPTER_CONFIG, CHECKPOINT, lock, require_replaceable
from tune.lookup import in_shell, local_path

OF_MODELS = ("config.json", ADAPTER_CONFIG)
OTHERS = (
    ".safetensors",
    ".gguf",
    ".bin",
    ".jsonl",
    ".json",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".pt",
    ".pth",
)  # models and data
PATIENCE = 10.0  # seconds until other nodes see a write to a shared file system
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "TUNE_RESTART_COUNT")  # the last one is set under Ray
_runs = itertools.count()


def choose(output_dir: str | None, recipe: str, world: World) -> str:
    """Return `output_dir`, or a new folder named after the time.

    When torchrun restarts the processes (--max-restarts), it is the folder of the first start, whose name is kept in
    torchrun's store, which outlives the processes. In a SLURM batch job, which may be requeued, the folder is named
    after the job and the step, which keep their numbers.
    """
    new, name = f"runs/{recipe}-{datetime.now():%Y%m%d-%H%M%S}", f"tune/output_dir/{next(_runs)}"
    if os.environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" in os.environ:  # not in a `srun --pty` shell
        new = f"runs/{recipe}-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    if world.is_main and not output_dir and (store := launcher_store(world.timeout)):
        new = store.compare_set(name, "", new).decode()
    return world.broadcast(output_dir or new)


def resumption(path: Path, resume: str) -> str:
    """Return `resume`, or `auto` if a launcher restarted the processes and a checkpoint exists."""
    if "://" in resume:
        raise TuneError(f"resume: {resume} is not a folder. To continue from a URL, set output_dir, or fetch the run")
    is_restart = any(os.environ.get(name, "0") != "0" for name in RESTARTS)
    return "auto" if is_restart and any(path.glob(f"checkpoints/{CHECKPOINT}")) else resume


def refusal(path: Path, resume: str, mark: Path, recipe: str | None) -> str:
    """Create the folder and the empty file `mark` in it. Return why the run cannot use or continue the folder, or "".

    A run of another `recipe` (None: unknown) cannot be continued.
    """
    if resume == "never" and ((path / "config.yaml").exists() or (path / "checkpoints").exists()):
        return f"output_dir: {path} holds a run already, and resume=never. Give another output_dir, or resume=auto"
    try:
        _require_no_other_files(path)
        _require_same_recipe(path, resume, recipe)
        for name in ("model", "adapter"):  # checked now instead of when the result is written
            require_replaceable(path / name)
        path.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        where = "Give one in a folder that you may write to"
        return f"output_dir: {path} cannot be made or written ({error.strerror}). {where}"
    except TuneError as error:
        return str(error)
    return ""


class PreparationLog(logging.Handler):
    """Writes lines about the preparation of data to log.txt in a run folder, which the first line creates."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock.hold(self.folder, make=True)
        records.prepare(self.folder)
        with (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"{record.getMessage()}\n")


def log_preparation(folder: Path | None) -> None:
    """Have lines about the preparation of data written to a run folder; None: to none, as before."""
    logger = logging.getLogger("tune.datasets")
    for handler in [handler for handler in logger.handlers if isinstance(handler, PreparationLog)]:
        logger.removeHandler(handler)
    if folder:
        logger.setLevel(logging.INFO)
        logger.addHandler(PreparationLog(folder))


def continued(path: Path, resume: str) -> Path | None:
    """Return the checkpoint from which a run in the folder `path` continues, if any. Raises as `checkpoint_at`."""
    if resume in ("auto", "never"):
        return max(path.glob(f"checkpoints/{CHECKPOINT}"), default=None) if resume == "auto" else None
    return checkpoint_at(Path(resume))


def _require_no_other_files(path: Path) -> None:
    """Raise TuneError if the folder holds models or data that readers could confuse with the run's results."""
    is_run = records.is_run(path) or (path / "checkpoints").exists()
    inside = path.iterdir() if path.is_dir() else ()
    names = sorted(file.name for file in inside if file.is_file() and not file.name.startswith("."))
    others = [name for name in names if name in OF_MODELS or (not is_run and name.lower().endswith(OTHERS))]
    if others and is_run:
        raise TuneError(
            f"output_dir: {path} is the folder of a run and also holds {', '.join(others)}, so it would be taken for a "
            "model. Move these files, or set another output_dir"
        )
    if others:
        raise TuneError(
            f"output_dir: {path} is not a run folder: it holds {', '.join(others[:3])}. Set a new folder, for example "
            f"inside it: output_dir={in_shell(str(path / 'run'))}"
        )


def _require_same_recipe(path: Path, resume: str, recipe: str | None) -> None:
    found = continued(path, resume)
    for key, folder in (("resume", found and found.parents[1]), ("output_dir", path)):
        had_recipe = records.recipe_of(folder) if folder else None
        if recipe and had_recipe and had_recipe != recipe:
            raise TuneError(
                f"{key}: {folder} is a run of the recipe {had_recipe}, not {recipe}. Continue with {had_recipe}, or "
                "set another output_dir"
            )


def require_shared(mark: Path, world: World) -> None:
    """Raise TuneError on all ranks if one does not find the file that rank 0 created in the run folder."""
    deadline = time.monotonic() + PATIENCE
    while not (found := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    without = sorted({node for node, finds in world.from_all_ranks((socket.gethostname(), found)) if not finds})
    if world.is_main:
        mark.unlink()
        with contextlib.suppress(OSError):  # the run creates it again when it starts
            mark.parent.rmdir()
    if without:
        raise TuneError(
            f"output_dir: {mark.parent} is not one folder for all processes: {', '.join(without)} does not see what "
            "the first process writes there. Set an absolute path on a file system that all nodes share"
        )


def require_same_files(settings: Any, world: World) -> None:
    """Raise TuneError on all ranks if a node lacks a model or data, or has other files than the first node.

    It compares names and sizes of files, and samples of their bytes.
    """
    paths = dict(_paths(settings)) if world.size > 1 else {}
    found = world.from_all_ranks([_state_of(path) for path in paths.values()]) if paths else []
    for (key, path), states in zip(paths.items(), zip(*found, strict=True), strict=True):
        if any(states) and not all(states):
            raise TuneError(
                f"{key}: {path} is missing on {_nodes([not state for state in states], world)}, but exists on other "
                "nodes. Mount it on all nodes under the same absolute path, or copy it to all nodes"
            )
        require_same(states, world, f"{key}: the files of {path}", "Mount one copy on all nodes, or copy it again")


def require_same(values: Sequence[Any], world: World, what: str, advice: str) -> None:
    """Raise TuneError on all ranks if their `values` differ. The message has `what` differs and `advice`."""
    if any(differ := [value != values[0] for value in values]):
        first = _nodes([rank == 0 for rank in range(world.size)], world)
        raise TuneError(
            f"{what} on {_nodes(differ, world)} differ from those on {first}, so that each would train on its own. "
            + advice
        )


def _nodes(chosen: Sequence[bool], world: World) -> str:
    """Return the names of the nodes with a chosen rank."""
    names = world.from_all_ranks(socket.gethostname())
    return ", ".join(sorted({name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen}))


def _paths(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Return keys and paths of models and data, without a sampler's path, which may differ between nodes."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _paths(value, f"{key}.{name}" if key else name)
    elif (
        isinstance(settings, str)
        and key.endswith((".path", ".validation", "reference"))
        and not key.startswith("sampling.")
    ):
        yield key, settings


def _state_of(path: str) -> str:
    """Return a digest of a file, or of a folder's top-level files except hidden ones and `.md`; "" if absent."""
    place = local_path(path)
    among = place.iterdir() if place.is_dir() else map(Path, glob.glob(str(place)))
    files = sorted(file for file in among if file.is_file() and not file.name.startswith(".") and file.suffix != ".md")
    names = [f"{file.name} {file.stat().st_size}" for file in files]
    return sampled_digest(names, files[:: 1 + len(files) // 64]) if files else ""
