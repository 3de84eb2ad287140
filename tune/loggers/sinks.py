"""Sinks for metrics and messages. Only rank 0 opens sinks."""

import contextlib
import copy
import functools
import io
import json
import mmap
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import DictConfig, OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tune import records
from tune.errors import TuneError
from tune.secrets import without_secrets
from tune.types import PositiveInt, checked

MLFLOW_BATCH = 100  # parameters that MLflow accepts per call
MLFLOW_VALUE = 500  # characters per parameter that every server accepts


class Sink:
    """A receiver of metrics and messages; subclasses override the methods that they need. Sinks named in settings are
    created on each process, but only rank 0's is opened."""

    def open(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Called first, with the run's folder, which may be a continued one, and its settings without secrets."""

    def start(self, step: int, total: int) -> None: ...
    def message(self, text: str) -> None: ...
    def metrics(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def open_sinks(folder: Path, trackers: Sequence[Sink], settings: DictConfig) -> list[Sink]:
    """Open and return all sinks except the console: the files in the run folder, and the trackers."""
    told: Any = without_secrets(OmegaConf.to_container(settings, resolve=True))
    sinks: list[Sink] = [Files(folder)]
    for tracker in trackers:
        sinks.append(NonFatal(tracker, sinks[0].message))
        sinks[-1].open(folder, told)
    return sinks


def require_installed(package: str) -> None:
    """Raise TuneError if the package of a tracker is not installed."""
    if find_spec(package) is None:
        raise TuneError(f"{package} is not installed. pip install 'tune-recipes[{package}]', or remove the tracker")


class Files(Sink):
    """Write every message to log.txt, and one object per optimizer step to metrics.jsonl. Later metrics of the last
    step are added to its object. A resumed run continues metrics.jsonl and samples.jsonl after the step it resumes
    from."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = {name: Lines(folder / name) for name in ("log.txt", "metrics.jsonl")}
        for file in self.files.values():
            file.open()
        self.one = threading.Lock()  # threads also send messages
        self.step: int | None = None  # the last logged step

    def start(self, step: int, total: int) -> None:
        for file in (self.folder / "metrics.jsonl", self.folder / "samples.jsonl"):
            if file.exists():
                os.truncate(file, lines_after(file, step)[0])

    def message(self, text: str) -> None:
        self.append("log.txt", text)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        values = {"step": step, "time": round(time.time(), 3), **values}
        if self.step not in (None, step) or not self._add_to_last(step, values):
            self.append("metrics.jsonl", json.dumps(values))
        self.step = step

    def _add_to_last(self, step: int, values: dict[str, float]) -> bool:
        """Add the values to the last line if it is of this step, by overwriting it with one write."""
        path = self.folder / "metrics.jsonl"
        begin, logged = lines_after(path, step - 1)
        if logged != [step] or self.files["metrics.jsonl"].waiting:
            return False
        with path.open("r+b", buffering=0) as file:
            file.seek(begin)
            before = file.read()
            logged_values = records.json_object(before)
            line = json.dumps(logged_values | values | {"time": logged_values["time"]}).encode() + b"\n"
            for content in (line, before):  # a full disk may write only a part: then restore the old line
                file.seek(begin)
                with contextlib.suppress(OSError):
                    if file.write(content) == len(line):
                        file.truncate(begin + len(line))
                        return True
            file.truncate(begin + len(before))
        return False

    def append(self, name: str, *lines: str) -> None:
        """Append lines to a file in the folder. On a full disk, the lines of all files wait."""
        with self.one:
            if name not in self.files:
                self.files[name] = Lines(self.folder / name)
            self.files[name].waiting += "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
            for file in self.files.values():
                file.write()

    def unwritten(self) -> str:
        """Describe the lines that wait and the reason; "" if none do."""
        waiting = [file for file in self.files.values() if file.waiting]
        return ", ".join(f"{file.count:,} lines of {file.path.name} ({file.error})" for file in waiting)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class Lines:
    """A text file to which lines are appended. On a full disk lines wait and are written later."""

    def __init__(self, path: Path):
        self.path, self.waiting, self.error = path, b"", ""
        self.file: io.FileIO | None = None

    def open(self) -> io.FileIO:
        self.file = self.file or self.path.open("ab", buffering=0)
        return self.file

    @property
    def count(self) -> int:
        return self.waiting.count(b"\n")

    def write(self) -> None:
        try:
            while self.waiting:
                self.waiting = self.waiting[self.open().write(self.waiting) :]
        except OSError as error:
            self.error = error.strerror or str(error)

    def close(self) -> None:
        self.write()
        with contextlib.suppress(OSError):
            if self.file:
                self.file.close()


def lines_after(file: Path, step: int) -> tuple[int, list[int]]:
    """Return the offset in a JSON lines file at which the lines after `step` begin, and their steps. `step` 0 means the
    whole file, including step 0 (a validation before the first step). An incomplete line of a killed process counts as
    after `step`. The file is read from its end, so a run of a million steps continues as fast as one of ten."""
    steps: list[int] = []
    end = file.stat().st_size if file.exists() else 0
    if end:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            while end:
                begin = lines.rfind(b"\n", 0, end - 1) + 1
                line = lines[begin:end]
                logged = records.json_object(line).get("step") if line.endswith(b"\n") else None
                if logged is not None:
                    if step and logged <= step:
                        break
                    steps.append(logged)
                end = begin
    return end, steps[::-1]


# Metrics on the console, if the run has them.
SHOWN = {
    "reward": ".4f",
    "loss": ".4f",
    "rewards/accuracies": ".3f",
    "lr": ".2e",
    "grad_norm": ".3f",
    "validation_reward": ".4f",
    "validation_loss": ".4f",
    "validation_rewards/accuracies": ".3f",
    "general_loss": ".4f",
    "general_kl": ".4f",
}


@checked
class Console(Sink):
    """A progress bar on a terminal, plain lines elsewhere: one for each `every` optimizer steps."""

    def __init__(self, every: PositiveInt = 1):
        columns = TextColumn("{task.description}"), TimeRemainingColumn()
        self.progress = Progress(BarColumn(16), MofNCompleteColumn(), *columns, disable=not sys.stdout.isatty())
        self.every = every
        if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks must not end a run
            sys.stdout.reconfigure(errors="backslashreplace")

    def start(self, step: int, total: int) -> None:
        self.total = total
        self.task = self.progress.add_task("", total=total, completed=step)
        self.progress.start()

    def message(self, text: str) -> None:
        if self.progress.live.is_started:
            self.progress.console.print(text, markup=False, highlight=False)
            return
        try:
            print(text, flush=True)
        except BrokenPipeError:  # the reader is gone, as `| tee` after Ctrl-C: the run continues, and saves
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError:  # stdout is a file on a full disk: the text stays buffered for the next message
            pass

    def metrics(self, step: int, values: dict[str, float]) -> None:
        shown = [f"{name} {values[name]:{form}}" for name, form in SHOWN.items() if name in values]
        validated = [name for name in SHOWN if name.startswith(("validation_", "general_")) and name in values]
        if "tokens_per_second" in values:  # absent for a validation before the first step
            speed = f"{values['tokens_per_second']:,.0f} tokens/s | {values['peak_memory_gib']:.2f} GiB"
            if "slowest_rank" in values:
                speed += f" | rank {values['slowest_rank']:.0f} takes {values['slowest_excess']:.0%} longer"
            at = len(shown) - len(validated)
            self.progress.update(self.task, completed=step, description=" | ".join([*shown[:1], speed]))
            shown[at:at] = [speed]
        if validated or (self.progress.disable and step % self.every == 0):
            self.message(" | ".join([f"step {step}/{self.total}", *shown]))

    def close(self) -> None:
        self.progress.stop()


class TensorBoard(Sink):
    """Write events to the folder `tensorboard` of the run. A continued run discards events after the step that it
    continues from, and logs them again."""

    def __init__(self) -> None:
        require_installed("tensorboard")
        self.writer: Any = None

    def open(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.make = functools.partial(SummaryWriter, str(folder / "tensorboard"))

    def start(self, step: int, total: int) -> None:
        self.writer = self.make(purge_step=step + 1 if step else 0)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer:
            self.writer.close()


@checked
class WeightsAndBiases(Sink):
    """Log to a `project` of Weights & Biases, in a run with this `name` (default: the folder's). A continued run folder
    continues the same W&B run."""

    def __init__(self, project: str, name: str | None = None):
        require_installed("wandb")
        self.project, self.name = project, name
        self.run: Any = None

    def open(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        with mock.patch.object(sys, "argv", without_secrets(sys.argv)):  # W&B also stores the command line
            self.run = wandb.init(
                project=self.project,
                name=self.name or folder.name,
                id=records.identity(folder),
                resume="allow",
                dir=str(folder),
                config=settings,
            )

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish(exit_code=int(_is_failure()))


@checked
class MLflow(Sink):
    """Log to an `experiment` of MLflow, in a run with this `name` (default: the folder's), on the server `uri` (None:
    MLFLOW_TRACKING_URI, or MLflow's default). A continued run folder continues the same MLflow run, found by its tag
    `tune.run`; steps that are trained again appear twice."""

    def __init__(self, experiment: str, name: str | None = None, uri: str | None = None):
        require_installed("mlflow")
        self.experiment, self.name, self.uri = experiment, name, uri
        self.client: Any = None
        self.run_id = ""

    def open(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Param

        # Each call waits for a server that does not answer, four minutes by default.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        if self.uri and "://" not in self.uri:  # a folder chosen by the user
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.client = mlflow.MlflowClient(self.uri)
        known = self.client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else self.client.create_experiment(self.experiment)
        identity = records.identity(folder)
        earlier = self.client.search_runs([experiment], f"tags.`tune.run` = '{identity}'", max_results=1)
        if earlier:
            self.run_id = earlier[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            return  # MLflow does not allow changes to a run's parameters
        run = self.client.create_run(experiment, tags={"tune.run": identity}, run_name=self.name or folder.name)
        self.run_id = run.info.run_id
        parameters = [Param(name, value[:MLFLOW_VALUE]) for name, value in _flat(settings)]
        for start in range(0, len(parameters), MLFLOW_BATCH):
            self.client.log_batch(self.run_id, params=parameters[start : start + MLFLOW_BATCH])

    def metrics(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in values.items()}
        self.client.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in named.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if _is_failure() else "FINISHED")


@checked
class Trackio(Sink):
    """Log to a `project` of Trackio, on this machine or in the Hugging Face Space `space`. Trackio identifies a run by
    its `name` (default: the folder's name and identity). A continued run folder continues the same Trackio run; steps
    that are trained again appear twice."""

    def __init__(self, project: str, name: str | None = None, space: str | None = None):
        require_installed("trackio")
        self.project, self.name, self.space = project, name, space
        self.run: Any = None

    def open(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import trackio

        self.run = trackio.init(
            project=self.project,
            name=self.name or f"{folder.name}-{records.identity(folder)[:8]}",
            space_id=self.space,
            config=dict(settings),
            resume="allow",
            embed=False,
        )

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


def _is_failure() -> bool:
    """Whether the run ends with an error or an interruption."""
    return sys.exc_info()[0] is not None


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting as text, by its dotted key."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


class NonFatal(Sink):
    """A sink whose failure does not end the run: it logs a warning once, is closed, and stays off. It gets its own
    copies of settings and values."""

    def __init__(self, sink: Sink, log: Callable[[str], None]):
        self.name, self.sink, self.log = type(sink).__name__, sink, log

    def open(self, folder: Path, settings: Mapping[str, Any]) -> None:
        with self._off_on_failure():
            self.sink.open(folder, copy.deepcopy(settings))

    def start(self, step: int, total: int) -> None:
        with self._off_on_failure():
            self.sink.start(step, total)

    def message(self, text: str) -> None:
        with self._off_on_failure():
            self.sink.message(text)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        with self._off_on_failure():
            self.sink.metrics(step, dict(values))

    def close(self) -> None:
        with self._off_on_failure():
            self.sink.close()

    @contextlib.contextmanager
    def _off_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # errors of a third-party client must not end training
            failed, self.sink = self.sink, Sink()  # does nothing
            with contextlib.suppress(Exception, SystemExit):
                failed.close()
            told = without_secrets(f"{self.name} is turned off after an error: {type(error).__name__}: {error}")
            self.log(f"warning: {told}")
            warnings.warn(told, stacklevel=3)
