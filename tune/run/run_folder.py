"""Choose the run folder, and check that this run can use it."""

import contextlib
import glob
import itertools
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
from tune.files import CHECKPOINT, require_replaceable
from tune.lookup import in_shell, local_path

OF_MODELS = ("config.json", "adapter_config.json")
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
PATIENCE = 10.0  # seconds after which another node sees what was written to a shared file system
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "TUNE_RESTART_COUNT")  # the last one: under Ray
_runs = itertools.count()


def choose(output_dir: str | None, recipe: str, world: World) -> str:
    """`output_dir`, or a new folder named by the time. Where torchrun starts the processes again (--max-restarts) it is
    that of the first start: torchrun's store, which outlives the processes, has its name. In a batch job of SLURM's,
    which may be queued again, it is named by the job and the step that `srun` gives the same number then."""
    new, name = f"runs/{recipe}-{datetime.now():%Y%m%d-%H%M%S}", f"tune/output_dir/{next(_runs)}"
    if os.environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" in os.environ:  # not in a shell of `srun --pty`
        new = f"runs/{recipe}-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    if world.is_main and not output_dir and (store := launcher_store(world.timeout)):
        new = store.compare_set(name, "", new).decode()
    return world.broadcast(output_dir or new)


def resumption(path: Path, resume: str) -> str:
    """`resume`; where a launcher starts the processes again, `auto` once there is a checkpoint."""
    if "://" in resume:
        raise TuneError(f"resume: {resume} is no folder. Continue a run from a URL by output_dir, or fetch it first")
    is_restart = any(os.environ.get(name, "0") != "0" for name in RESTARTS)
    return "auto" if is_restart and any(path.glob(f"checkpoints/{CHECKPOINT}")) else resume


def refusal(path: Path, resume: str, mark: Path, recipe: str | None) -> str:
    """Make the folder, and the empty file `mark` in it. Returns why the run cannot use the folder, or not continue what
    is in it, as that is of another `recipe` (None: unknown); "" if it can."""
    if resume == "never" and ((path / "config.yaml").exists() or (path / "checkpoints").exists()):
        return f"output_dir: {path} holds a run already, and resume=never. Give another output_dir, or resume=auto"
    try:
        _require_no_other_files(path)
        _require_same_recipe(path, resume, recipe)
        for name in ("model", "adapter"):  # found out now, and not when the result is to be written
            require_replaceable(path / name)
        path.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        where = "Give one in a folder that you may write to"
        return f"output_dir: {path} cannot be made or written ({error.strerror}). {where}"
    except TuneError as error:
        return str(error)
    return ""


def continued(path: Path, resume: str) -> Path | None:
    """The checkpoint from which a run in the folder `path` goes on, if any. Raises TuneError as `checkpoint_at`."""
    if resume in ("auto", "never"):
        return max(path.glob(f"checkpoints/{CHECKPOINT}"), default=None) if resume == "auto" else None
    return checkpoint_at(Path(resume))


def _require_no_other_files(path: Path) -> None:
    """Raises TuneError if the folder is none of a run and has models or data in it: what reads a folder would take the
    one for the other."""
    is_run = records.is_run(path) or (path / "checkpoints").exists()
    inside = path.iterdir() if path.is_dir() else ()
    names = sorted(file.name for file in inside if file.is_file() and not file.name.startswith("."))
    others = [name for name in names if name in OF_MODELS or (not is_run and name.lower().endswith(OTHERS))]
    if others and is_run:
        raise TuneError(
            f"output_dir: {path} is the folder of a run, and holds {', '.join(others)}, with which it would be taken "
            "for a model. Move these files, or give another output_dir"
        )
    if others:
        raise TuneError(
            f"output_dir: {path} is not the folder of a run: it holds {', '.join(others[:3])}. Give a new folder, also "
            f"one inside of it: output_dir={in_shell(str(path / 'run'))}"
        )


def _require_same_recipe(path: Path, resume: str, recipe: str | None) -> None:
    found = continued(path, resume)
    for key, folder in (("resume", found and found.parents[1]), ("output_dir", path)):
        had_recipe = records.recipe_of(folder) if folder else None
        if recipe and had_recipe and had_recipe != recipe:
            raise TuneError(
                f"{key}: {folder} is of the recipe {had_recipe}, and this one is {recipe}. Continue with {had_recipe}, "
                "or give another output_dir"
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


def require_same_files(settings: Any, world: World) -> None:
    """Raises TuneError on all ranks if a model or data are missing on a node, or differ from those on the first: names
    and sizes of files are compared, and samples of their bytes."""
    paths = dict(_paths(settings)) if world.size > 1 else {}
    found = world.all_gather([_state_of(path) for path in paths.values()]) if paths else []
    for (key, path), states in zip(paths.items(), zip(*found, strict=True), strict=True):
        if any(states) and not all(states):
            raise TuneError(
                f"{key}: {path} is not there on {_nodes([not state for state in states], world)}, and is on other "
                "nodes. Mount it there under the same path, an absolute one, or copy it to all nodes"
            )
        require_same(states, world, f"{key}: the files of {path}", "Mount one copy on all nodes, or copy it again")


def require_same(values: Sequence[Any], world: World, what: str, advice: str) -> None:
    """Raises TuneError on all ranks if their `values` differ. The message says `what` differs, and gives `advice`."""
    if any(differ := [value != values[0] for value in values]):
        first = _nodes([rank == 0 for rank in range(world.size)], world)
        raise TuneError(
            f"{what} on {_nodes(differ, world)} differ from those on {first}, so that each would train on its own. "
            + advice
        )


def _nodes(chosen: Sequence[bool], world: World) -> str:
    """The names of the nodes with a chosen rank."""
    names = world.all_gather(socket.gethostname())
    return ", ".join(sorted({name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen}))


def _paths(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Keys and paths of models and data. A sampler's own path may be another one on each node, and is left out."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _paths(value, f"{key}.{name}" if key else name)
    elif isinstance(settings, str) and key.endswith((".path", "reference")) and not key.startswith("sampling."):
        yield key, settings


def _state_of(path: str) -> str:
    """A digest of a file, or of the files directly in a folder, without hidden ones and `.md`; "" if there is none."""
    place = local_path(path)
    among = place.iterdir() if place.is_dir() else map(Path, glob.glob(str(place)))
    files = sorted(file for file in among if file.is_file() and not file.name.startswith(".") and file.suffix != ".md")
    names = [f"{file.name} {file.stat().st_size}" for file in files]
    return sampled_digest(names, files[:: 1 + len(files) // 64]) if files else ""
