"""Resolve a path that a user gives to its folders: a model, an adapter, a run, or a checkpoint of a run."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tune.errors import TuneError, explained
from tune.files import CHECKPOINT, is_adapter
from tune.lookup import in_shell, local_path
from tune.models import ConfigFile, no_folder, read_json
from tune.peft.files import CONFIG
from tune.run_settings import settings_file

ANY = "a model (with config.json), an adapter or a run folder"


@dataclass(frozen=True)
class Resolved:
    """The folders of a model: its base, its adapters, and the tokenizer that it was trained with."""

    base: Path
    adapters: tuple[Path, ...]
    tokenizer: Path

    @property
    def title(self) -> str:
        """A description of the merged model for its card."""
        merged = (f" with the adapter `{'/'.join(folder.parts[-2:])}` merged in" for folder in self.adapters)
        return f"`{self.base.name}`{''.join(merged)}"


def resolve_model(path: str | Path, adapters: Sequence[str | Path] = (), setting: str = "") -> Resolved:
    """Resolve `path`: a model in Hugging Face layout, an adapter in PEFT layout, or a run folder.

    The base of an adapter is the one in its config. A run stands for its model/, else its adapter/. `adapters` are
    further adapters, or runs that have one.

    Raises:
        TuneError: a path is none of these, or the base of an adapter is not where its config says. The message begins
            with `setting`, if given.
    """
    place = local_path(path)
    if not place.is_dir():
        if setting:
            ConfigFile(place, setting)  # raises with suggestions
        raise TuneError(no_folder(place, ANY))
    with explained(setting) if setting else nullcontext():
        return _resolved(place, adapters)


def _resolved(place: Path, adapters: Sequence[str | Path]) -> Resolved:
    folder = exported_folder(place)
    its_own = [folder] if is_adapter(folder) else []
    on_it = [*its_own, *map(adapter_folder, adapters)]
    base = folder
    if its_own:
        named = read_json(folder / CONFIG, "adapter").get("base_model_name_or_path") or ""
        base = local_path(named)
        if not named or not base.is_dir():
            raise TuneError(
                f"{folder} is an adapter of {named or 'a base that it does not name'}, which is not a folder here. "
                f"Give the base and the adapter: BASE --adapter {in_shell(folder)} (`tune download` gets a model from "
                "the hub)"
            )
    folders = [folder for folder in reversed(on_it) if (folder / "tokenizer.json").exists()]
    return Resolved(base, tuple(on_it), folders[0] if folders else base)


def adapter_folder(path: str | Path) -> Path:
    """The adapter folder `path`, or the adapter that the run `path` has exported. Raises TuneError if there is none."""
    given = local_path(path)
    folder = exported_folder(given, "adapter") if given.is_dir() else given
    if not (folder / CONFIG).exists():
        raise TuneError(f"{folder} is not an adapter: it has no {CONFIG}. Give a folder in PEFT layout, or its run")
    return folder


def exported_folder(path: Path, first: Literal["model", "adapter"] = "model") -> Path:
    """The model or adapter folder of `path`: the export of a run, `first` if it has both, or `path` itself."""
    second = "adapter" if first == "model" else "model"
    is_run = any((path / name).is_file() for name in ("run.json", "metrics.jsonl"))  # also one in a model's folder
    for folder in (*([] if is_run else [path]), path / first, path / second):
        if (folder / "config.json").exists() or (folder / CONFIG).exists():
            return folder
    places = path, path.parent, path.parent.parent
    run = next((place for place in places if (place / "config.yaml").exists()), path if is_run else None)
    steps = steps_of(run) if run and (run / "checkpoints").is_dir() else {}
    if run and run != path and steps and any((run / name).is_dir() for name in ("model", "adapter")):
        named, place = step_of(path)[1], in_shell(run)
        step = named if named in steps else max(steps)
        raise TuneError(
            f"{path} is for resuming, not a model. Name the run and one of its steps ({place} --step {step}), or that "
            f"step's folder ({in_shell(steps[step])}). To make a model of it: `tune export {place} --step {step} --to "
            "hf --out FOLDER`"
        )
    if run:
        found = ", ".join(folder.name for folder in steps.values()) or "no checkpoint either"
        raise TuneError(
            f"{path}: this run has not exported anything yet: it has neither model/ nor adapter/, but {found}. Let it "
            f"finish (the command that started it, with output_dir={in_shell(run)}, continues after its last "
            f"checkpoint), or export a checkpoint: `tune export {in_shell(run)} --step N --to hf --out FOLDER`"
        )
    if not path.is_dir():
        raise TuneError(no_folder(path, ANY))
    content = ", ".join(sorted(child.name for child in path.iterdir())[:8]) or "nothing"
    raise TuneError(
        f"{path} is neither a model (config.json), nor an adapter ({CONFIG}), nor a run (config.yaml); it has {content}"
    )


def step_of(path: str | Path, step: int | None = None) -> tuple[Path, int | None]:
    """The run and the step of a checkpoint; `path` may be the checkpoint itself, RUN/checkpoints/step-N."""
    place = local_path(path)
    if step is None and place.parent.name == "checkpoints" and place.match(CHECKPOINT):
        return place.parent.parent, int(place.name.removeprefix("step-"))
    return place, step


def steps_of(run: Path) -> dict[int, Path]:
    """The checkpoints of a run, by step. Raises TuneError if it has no checkpoints folder."""
    if not (run / "checkpoints").is_dir():
        raise TuneError(f"{run} is not a run folder: it has no checkpoints")
    folders = sorted(run.glob(f"checkpoints/{CHECKPOINT}"))
    return {int(folder.name.removeprefix("step-")): folder for folder in folders}


def checkpoint_of(run: Path, step: int) -> tuple[Path, Path]:
    """The checkpoint of `run` after `step`, and the newest file with the run's settings. Raises TuneError if one of
    them does not exist."""
    settings = settings_file(run)
    checkpoints = steps_of(run) if (run / "checkpoints").is_dir() else {}
    if step not in checkpoints or settings is None:
        steps = ", ".join(map(str, checkpoints)) or "none"
        raise TuneError(f"{run} has no checkpoint of step {step}; it has {steps}. Give a run and one of its steps")
    return checkpoints[step], settings
