"""Building blocks of the benchmark: processes with a time limit, runs of recipes, and results."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT_LINES = 12  # lines kept from the output of a failed process
LEAST_SECONDS = 10.0  # a part with less time left is not started


class Failed(Exception):
    """Raised if a process fails or runs out of time; has its last lines."""


class Skipped(Exception):
    """Raised with the reason why a part is skipped."""


@dataclass
class Check:
    """A number with a limit."""

    name: str
    found: float
    wanted: float

    @property
    def passed(self) -> bool:
        return self.found <= self.wanted  # false for NaN


@dataclass
class Training:
    """Medians over the timed steps of a run. `start` is the time from the start of the process to the end of the first
    step, `sampling` the seconds of a step spent in a rollout."""

    name: str
    tokens_per_second: float
    step_seconds: float
    start: float
    peak_gib: float | None = None
    mfu: float | None = None
    sampling: float | None = None


@dataclass
class Sampling:
    """Seconds of calls that sample `new` tokens for each of `rows` prompts."""

    name: str
    rows: int
    new: int
    seconds: list[float]
    peak_gib: float | None


@dataclass
class Traffic:
    """The communication of a layout in a step, and the share that computation hides."""

    name: str
    gib_sent: float
    exchange_seconds: float
    hidden_share: float


Result = Check | Training | Sampling | Traffic


@dataclass
class Bench:
    """A folder with inputs, and the processes that use them. On a CPU all shapes are tiny."""

    folder: Path
    device: str
    deadline: float  # of time.monotonic()
    memory: float = 0.0  # GiB of the device
    threads: int | None = None  # of a process on the CPU; None: the default
    devices: int = 1

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"

    @property
    def length(self) -> int:
        """Tokens per packed row."""
        return 512 if self.tiny else 4096

    @property
    def new_tokens(self) -> int:
        """Tokens sampled for each prompt."""
        return 8 if self.tiny else 128

    def model(self, shape: str) -> Path:
        if self.tiny:
            shape = "tiny-moe" if "moe" in shape else "tiny"
        return self.folder / shape

    @property
    def chats(self) -> Path:
        return self.folder / "chats.jsonl"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    def require_memory(self, gib: float) -> None:
        if self.device == "cuda" and self.memory < gib:
            raise Skipped(f"needs about {gib:.0f} GiB")

    def process(self, *command: str | Path, limit: float, stop: Callable[[], bool] = lambda: False) -> str:
        """Run `command` and return its output; with `stop`, only until that is true. Raises Failed."""
        if self.tiny:
            limit *= 10  # limits are meant for a GPU
        end = time.monotonic() + limit
        if time.monotonic() + LEAST_SECONDS > self.deadline:
            raise Skipped("no time was left")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
            "TUNE_CACHE": str(self.folder / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),  # always compile from scratch
        }
        if self.threads:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [str(each) for each in command], stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                while (code := process.poll()) is None and not (stopped := stop()):
                    if time.monotonic() > min(end, self.deadline):
                        break
                    time.sleep(0.01)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        lines = text.strip().splitlines()[-KEPT_LINES:]
        if code:
            raise Failed("\n".join([*lines, f"exit status {code}"]))
        if code is None and not stopped:
            raise Failed("\n".join([*lines, f"stopped after {time.monotonic() - end + limit:.0f} seconds"]))
        return text

    def script(self, name: str, *arguments: str | Path, limit: float) -> list:
        """Return the JSON lines that a script of this folder prints."""
        text = self.process(sys.executable, HERE / name, *arguments, limit=limit)
        return [json.loads(line) for line in text.splitlines() if line.startswith(('{"', '["'))]

    def recipe(
        self, name: str, recipe: str | Path, *settings: str, limit: float, steps: int | None = None, processes: int = 1
    ) -> "Run":  # fmt: skip
        """Run a recipe, or the file of a copy, as from the command line to its end; with `steps`, kill it after it
        has logged them. torchrun starts several `processes`."""
        run = Run(self.folder / "runs" / name)
        script = recipe if isinstance(recipe, Path) else ROOT / "recipes" / f"{recipe}.py"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *(torchrun if processes > 1 else []), script]
        settings = (f"output_dir={run.folder}", f"device={self.device}", *settings)
        self.process(*command, *settings, limit=limit, stop=lambda: run.has_logged(steps))
        return run


class Run:
    """The folder of a run. `start`: seconds until it had logged its first step."""

    def __init__(self, folder: Path):
        self.folder, self.begin = folder, time.monotonic()
        self.start: float | None = None

    def steps(self) -> list[dict]:
        """Return the logged metrics of each step; an incomplete last line is skipped."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        return [entry for entry in entries if "loss" in entry]

    def has_logged(self, steps: int | None) -> bool:
        count = len(self.steps())
        if count and self.start is None:
            self.start = time.monotonic() - self.begin
        return steps is not None and count >= steps

    def curve(self, name: str = "loss") -> dict[int, float]:
        return {entry["step"]: entry[name] for entry in self.steps()}


def at_once(*functions: Callable[[], Run]) -> list[Run]:
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(function) for function in functions]]
