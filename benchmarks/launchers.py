"""Measure what a launcher adds to a step: torchrun and Ray in turns, with one thread per process.

    python benchmarks/launchers.py --steps 60 --times 3 model.path=./model dataset.path=./rows.jsonl max_seq_len=128

Prints for each run, from its tenth to its second to last step: the median seconds of a step, the CPU seconds of the
training processes, and the CPU seconds of the launcher's other processes. Then prints the medians over pairs of Ray's
overhead. On a busy machine only CPU seconds are comparable; if the processes use all cores, Ray's other processes
compete with them. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

LAUNCHERS = ("torchrun", "ray")
FIRST = 10


def metrics(folder: Path) -> list[float]:
    with suppress(FileNotFoundError):
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line)["step_seconds"] for line in lines if line.endswith("\n")]
    return []


def cpu_seconds(folder: Path) -> tuple[float, float]:
    """Return the CPU seconds so far of the training processes, and of all others with `folder` in their environment."""
    found = [0.0, 0.0]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"BENCHMARK={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                name = (process / "cmdline").read_bytes()
                trains = b"RayTrainWorker" in name or b"full_finetune.py" in name
                fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                found[not trains] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found[0], found[1]


def measured(launcher: str, count: int, steps: int, settings: list[str], folder: Path) -> tuple[float, float, float]:
    command = ["-m", "tune.cli", "run", "--launcher", launcher, f"--nproc-per-node={count}", "full_finetune"]
    run = subprocess.Popen(
        [sys.executable, *command, *settings, f"output_dir={folder}"],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"BENCHMARK": str(folder), "OMP_NUM_THREADS": "1"},
    )

    def reached(step: int) -> tuple[int, tuple[float, float]]:
        while (found := len(metrics(folder))) < step:
            assert run.poll() is None, f"{launcher} has ended with {run.returncode}"
            time.sleep(0.02)
        return found, cpu_seconds(folder)

    (first, before), (last, after) = reached(FIRST), reached(steps - 1)
    seconds = median(metrics(folder)[first:last])
    assert run.wait() == 0, f"{launcher} has ended with {run.returncode}"
    trains, beside = ((now - then) / (last - first) for now, then in zip(after, before, strict=True))
    print(f"{launcher}: {seconds:.3f} s, {trains:.3f} CPU s, other processes {beside:.3f} CPU s", flush=True)
    return seconds, trains, trains + beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("settings", nargs="+", metavar="key=value", help="settings of full_finetune")
    options = parser.parse_args()
    settings = [
        *options.settings,
        f"max_steps={options.steps}",
        "checkpointer.every=null",
        "device=cpu",
        "compute.dtype=fp32",
    ]
    settings += ["global_batch_size=2"]
    ratios = []
    for turn in range(options.times):
        with tempfile.TemporaryDirectory() as name:
            order = LAUNCHERS if turn % 2 == 0 else LAUNCHERS[::-1]
            given = options.processes, options.steps, settings
            found = {each: measured(each, *given, Path(name) / each) for each in order}
        ratios.append([ray / torchrun - 1 for torchrun, ray in zip(found["torchrun"], found["ray"], strict=True)])
    names = ("seconds", "CPU seconds of training", "CPU seconds of all")
    for what, shares in zip(names, zip(*ratios, strict=True), strict=True):
        print(f"{what}: Ray {median(shares):+.1%} ({', '.join(f'{each:+.1%}' for each in shares)})")


if __name__ == "__main__":
    main()
