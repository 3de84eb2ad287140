"""Read and write the records of a run in its folder. run.json has the run's state; each start adds to it."""

import io
import json
import math
import time
import uuid
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tune import config
from tune.errors import TuneError
from tune.files import CHECKPOINT, lock, written_aside
from tune.lookup import absent, did_you_mean_path, in_shell
from tune.secrets import without_secrets
from tune.terminal import all_visible, visible

STARTS = 100  # latest starts to keep, besides the first: a run may be started thousands of times
FILES = ("run.json", "config.yaml", "metrics.jsonl")  # a run folder has at least one of these


def is_run(folder: Path) -> bool:
    """Whether a run has written to the folder."""
    return any((folder / name).is_file() for name in FILES)


def prepare(folder: Path) -> None:
    """Record in run.json that data are prepared for a run, unless a run has written to the folder."""
    if not is_run(folder):
        _note(folder, state="preparing")


def start(folder: Path, step: int, **facts: Any) -> None:
    """Record in run.json that the run starts after `step`; the first and the latest starts are kept."""
    before = _json(folder / "run.json")
    starts = [*before.get("starts", []), {"step": step, "time": time.time()}]
    count = before.get("number_of_starts", len(starts) - 1) + 1
    starts[1:-STARTS] = []
    _note(folder, state="running", error=None, starts=starts, number_of_starts=count, **facts)


def end(folder: Path, error: BaseException | None, exported_step: int | None = None) -> None:
    """Record in run.json how the run ended: with `error`, or normally with the weights of `exported_step`."""
    code = error.code if isinstance(error, SystemExit) else 1
    if error is None or not code:
        _note(folder, state="done", exported_step=exported_step)
    elif isinstance(error, KeyboardInterrupt) or code == 130:
        _note(folder, state="interrupted")
    else:
        kind = "" if isinstance(error, TuneError) else f"{type(error).__name__}: "
        _note(folder, state="failed", error=without_secrets(f"{kind}{error}"))


def is_done(folder: Path) -> bool:
    """Whether the run in a folder ended normally and wrote all its results."""
    return _json(folder / "run.json").get("state") == "done"


def recipe_of(folder: Path) -> str | None:
    """Return the recipe of the run in a folder; None if unknown."""
    return _json(folder / "run.json").get("recipe")


def identity(folder: Path) -> str:
    """Return the unique id of the run in a folder, which is created once and stored in run.json."""
    if "id" not in _json(folder / "run.json"):
        _note(folder, id=uuid.uuid4().hex)
    return str(_json(folder / "run.json")["id"])


def _note(folder: Path, **facts: Any) -> None:
    with written_aside(folder / "run.json") as unfinished:
        unfinished.write_text(json.dumps(_json(folder / "run.json") | facts, indent=2) + "\n", encoding="utf-8")


def _json(file: Path) -> dict[str, Any]:
    return json_object(file.read_bytes()) if file.is_file() else {}


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse `text` as a JSON object; an empty one if it is not."""
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


@dataclass
class Record:
    """A run as recorded in its folder. Missing or unreadable parts are empty."""

    path: Path
    state: str  # preparing | running | done | interrupted | failed | killed
    facts: dict[str, Any]  # run.json
    columns: dict[str, np.ndarray]  # values by metric at the steps in columns["step"]; NaN: no value
    unreadable: int = 0  # lines of metrics.jsonl

    @property
    def goes_on(self) -> bool:
        """Whether a process prepares data for the run or trains."""
        return self.state in ("preparing", "running")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the last start by dotted key, read when they are asked for."""
        return self._saved[0]

    @cached_property
    def data(self) -> dict[str, Any]:
        """The values in data.json, read when they are asked for."""
        return all_visible(_json(self.path / "data.json"))

    @property
    def problems(self) -> list[str]:
        """The parts that cannot be read."""
        if not self.unreadable:
            return self._saved[1]
        ignored = f"{self.unreadable:,} lines of metrics.jsonl are ignored: they are not the metrics of a step"
        return [*self._saved[1], ignored]

    @cached_property
    def _saved(self) -> tuple[dict[str, Any], list[str]]:
        """The settings, and why they cannot be read."""
        try:
            return all_visible(config.saved(self.path)), []
        except TuneError as error:
            return {}, [str(error)]

    def known(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that have a metric, and its values."""
        values = self.columns.get(metric, np.full(len(self.columns["step"]), np.nan))
        return self.columns["step"][~np.isnan(values)], values[~np.isnan(values)]

    def last(self, metric: str) -> float:
        """Return the last value of a metric, or NaN."""
        return float(self.known(metric)[1][-1:].sum()) if len(self.known(metric)[1]) else math.nan

    @cached_property
    def exported_step(self) -> int | None:
        """The step of the exported weights: the best one (checkpointer.keep_best), or the last one. None until done."""
        if self.state != "done" or not len(self.columns["step"]):
            return None
        return self.facts.get("exported_step") or self.best or int(self.columns["step"][-1])

    def result(self, metric: str) -> tuple[int | None, float]:
        """Return the step and the value of a metric that describe the result of the run, or None and NaN.

        Of a run that is done, it is the value of the exported weights: the one at their step, or the last one before.
        Else it is the last value.
        """
        steps, values = self.known(metric)
        if self.exported_step is not None:
            values = values[steps <= self.exported_step]
            steps = steps[: len(values)]
        return (int(steps[-1]), float(values[-1])) if len(values) else (None, math.nan)

    def shown(self, metric: str) -> str:
        """Format the value of a metric that describes the result, with its step if that is not the run's last."""
        step, value = self.result(metric)
        late = f" (step {number(step)})" if step is not None and step < self.columns["step"][-1] else ""
        return number(value) + late

    def text(self, file: str, most: int, start: bool = False) -> str:
        """Read the last `most` bytes of a file; with `start`, the first."""
        with suppress(OSError), (self.path / file).open("rb") as content:
            content.seek(0 if start else max(0, content.seek(0, 2) - most))
            return visible(content.read(most).decode(errors="replace"))
        return ""

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint (checkpointer.keep_best), if it exists."""
        newest = max(self.path.glob(f"checkpoints/{CHECKPOINT}/state.json"), default=None, key=str)
        step = _json(newest).get("best", {}).get("step") if newest else None
        return step if step and (self.path / f"checkpoints/step-{step:08d}").is_dir() else None

    @property
    def inputs(self) -> dict[str, Any]:
        """The settings and the counts of the data."""
        counts = {name: value for name, value in self.data.items() if not isinstance(value, list | dict)}
        counts = {name: value for name, value in counts.items() if not name.startswith("prepared")}
        return self.settings | {f"data: {name.replace('_', ' ')}": value for name, value in counts.items()}

    @property
    def warnings(self) -> list[str]:
        """Warnings about the data, warnings in the log, and parts that cannot be read."""
        lines = self.text("log.txt", 1 << 20).splitlines()
        logged = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
        return [*dict.fromkeys([*self.data.get("warnings", []), *logged, *self.problems])]

    @property
    def started(self) -> float:
        """The start of the run, in seconds since 1970."""
        return self.facts["starts"][0]["time"] if self.facts.get("starts") else self.path.stat().st_mtime


def read(folder: Path, tail: int | None = None) -> Record:
    """Read the run in `folder`; with `tail`, only the metrics in the last `tail` bytes, unless the exported weights are
    of an earlier step. Raises TuneError."""
    if not folder.exists():
        raise TuneError(f"{folder} {absent(folder)}.{did_you_mean_path(folder, '*/')} Give the output_dir of a run")
    if not is_run(folder):
        inside = len(find(folder))
        advice = (
            f"`tune runs {in_shell(folder)}` lists the {inside} in it" if inside else "Give the output_dir of a run"
        )
        raise TuneError(f"{folder} is not a run folder: it has none of {', '.join(FILES)}. {advice}")
    columns, unreadable = _metrics(folder / "metrics.jsonl", tail)
    facts = all_visible(_json(folder / "run.json"))
    run = Record(folder, _state(folder, facts), facts, columns, unreadable)
    if tail and run.exported_step is not None and run.exported_step < columns["step"][0]:
        return read(folder)
    return run


def find(folder: Path) -> list[Path]:
    """Find run folders in a folder and in its subfolders."""
    files = (file for name in FILES for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{name}"))
    return sorted({file.parent for file in files})


def differences(values: Sequence[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return the keys whose values differ, with the values. output_dir and resume are ignored."""
    keys = dict.fromkeys(key for each in values for key in each if key not in ("output_dir", "resume"))
    rows = [(key, [each.get(key) for each in values]) for key in keys]
    return [(key, row) for key, row in rows if any(value != row[0] for value in row)]


def number(value: float) -> str:
    """Format a number for people."""
    if not math.isfinite(value):
        return "" if math.isnan(value) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _state(folder: Path, facts: dict[str, Any]) -> str:
    state = facts.get("state", "running")
    if state not in ("preparing", "running"):
        return state
    if lock.is_held(folder):
        return state
    return "killed" if facts or not any((folder / name).is_dir() for name in ("model", "adapter")) else "done"


def _metrics(file: Path, tail: int | None) -> tuple[dict[str, np.ndarray], int]:
    """Return the metrics by step, and the number of unreadable lines. If a step appears twice, the last line counts."""
    columns, unreadable = {"step": array("d")}, 0
    with file.open("rb") if file.is_file() else io.BytesIO() as lines:
        size = lines.seek(0, 2)
        if lines.seek(max(0, size - (tail or size))):
            lines.readline()  # skip the rest of a line
        for line in lines:
            try:
                values = json_object(line).items()
                numbers = {visible(name): float(each) for name, each in values if isinstance(each, int | float)}
                columns["step"].append(numbers.pop("step"))
            except (KeyError, OverflowError):
                unreadable += line.endswith(b"\n")  # a killed process may leave a partial last line
                continue
            rows = len(columns["step"]) - 1
            for name, value in numbers.items():
                column = columns.setdefault(name, array("d"))
                column.extend([math.nan] * (rows - len(column)))
                column.append(value)
    for column in columns.values():
        column.extend([math.nan] * (len(columns["step"]) - len(column)))
    steps, places = np.unique(np.array(columns["step"])[::-1], return_index=True)
    return {name: np.array(column)[::-1][places] for name, column in columns.items()} | {"step": steps}, unreadable
