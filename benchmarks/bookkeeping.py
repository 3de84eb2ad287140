"""Measure the bookkeeping of a long run without training: a million steps, restarted every 100 as after a kill.

    python benchmarks/bookkeeping.py [--steps 1000000 --restart-every 100 --keep 2]

Each start creates a new Run and a new Checkpointer on the same folder, continues after the newest checkpoint, and stops
abruptly 30 steps after its last checkpoint. Prints ten times: seconds of a start and of a step, resident memory, and
sizes in the folder. At the end, checks the folder's record of the run and writes the report.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from omegaconf import OmegaConf
from torch import nn

from tune import checkpointers, distributed, records
from tune.run import Run


class Position:
    """The position in the data."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--restart-every", type=int, default=100)
    parser.add_argument("--keep", type=int, default=2)
    options = parser.parse_args()
    world = distributed.init("cpu")
    print("    step  s a start  ms a step  resident MiB  metrics MiB  log MiB  other MiB  files  checkpoints")
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder, "run")
        saved, told = 0, 0
        while saved < options.steps:
            start_seconds, step_seconds, saved = attempt(world, run_folder, options)
            if saved * 10 // options.steps > told:
                told = saved * 10 // options.steps
                tell(run_folder, saved, start_seconds, step_seconds)
        lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["step"] for line in lines] == [*range(1, options.steps + 1)]
        begin = time.perf_counter()
        records.write_report([run_folder], run_folder / "report.html")
        size = (run_folder / "report.html").stat().st_size / 2**20
        print(f"each step is there once; report.html: {size:.1f} MiB in {time.perf_counter() - begin:.1f} s")


def attempt(world: distributed.World, folder: Path, options: argparse.Namespace) -> tuple[float, float, int]:
    """Run one start until its kill. Returns the seconds of the start and of a step, and the last saved step."""
    begin = time.perf_counter()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    position = Position()
    with contextlib.redirect_stdout(io.StringIO()):
        run = Run("simulated", world, str(folder), settings=OmegaConf.create({"seed": 0}))
        checkpointer = checkpointers.Checkpointer(
            run, model=model, optimizer=optimizer, data=position, every=50, async_=False,
            schedule=torch.optim.lr_scheduler.ConstantLR(optimizer), keep=options.keep,
        )  # fmt: skip
        batch = SimpleNamespace(num_tokens=1000, num_supervised=500)

        def batches() -> Iterator[tuple[int, SimpleNamespace]]:  # asked for once the position is restored
            yield from ((step, batch) for step in range(start + 1, until + 1))

        steps = run.steps(batches(), checkpointer, total=options.steps)
        start = run.step
        until = min(start + options.restart_every + 30, options.steps)
        began = time.perf_counter()
        for position.step, _ in steps:
            run.log(position.step, batch, {"loss": 1.0 / position.step, "grad_norm": 0.5, "lr": 1e-5})
            checkpointer.step(position.step)
        seconds = (time.perf_counter() - began) / (until - start)
        saved = checkpointer.wait()
        for sink in run.sinks:
            sink.close()
    checkpointer.background.shutdown()
    return began - begin, seconds, saved


def tell(folder: Path, step: int, start_seconds: float, step_seconds: float) -> None:
    files = [file for file in folder.rglob("*") if file.is_file()]
    sizes = {file.name: file.stat().st_size / 2**20 for file in files if file.parent == folder}
    resident = psutil.Process().memory_info().rss / 2**20
    others = sum(size for name, size in sizes.items() if name not in ("metrics.jsonl", "log.txt"))
    print(
        f"{step:8,}{start_seconds:11.3f}{1000 * step_seconds:11.3f}{resident:14.0f}{sizes['metrics.jsonl']:13.1f}"
        f"{sizes['log.txt']:9.1f}{others:11.2f}{len(files):7}{len([*folder.glob('checkpoints/step-*')]):13}",
        flush=True,
    )


if __name__ == "__main__":
    main()
