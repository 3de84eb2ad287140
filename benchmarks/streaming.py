"""Train on a streamed file, kill and continue the run, and compare memory and loss curves.

    python benchmarks/streaming.py --gigabytes 5 --folder /somewhere/with/room
    python benchmarks/streaming.py --gigabytes 2 --ray      # by Ray Data, on a cluster of this machine

The rows have a short prompt and completion, and 20 kB in an unused column: the whole file is read, but training on a
pass takes only minutes. Memory is summed over all processes of the run, including Ray's, and read once per second
(proportional set size; Linux only). Exits with 1 if the curve of the killed run differs.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from kill_and_resume import Launch, losses, make_inputs

ROW, BATCH = 512, 64  # tokens of a packed row, rows of a step
BALLAST = 20_000  # bytes
MARK = "TUNE_STREAMING_BENCHMARK"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--kill-at", type=float, default=0.6, help="share of the steps after which it is killed")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--ray", action="store_true", help="dataset._component_=tune.datasets.ray")
    options = parser.parse_args()
    os.environ[MARK] = str(os.getpid())  # inherited by all processes of a run, to find them
    with tempfile.TemporaryDirectory(dir=options.folder) as path:
        folder = Path(path)
        settings = [setting for setting in make_inputs(folder) if not setting.startswith("epochs=")]
        rows, tokens = write_rows(folder / "rows.jsonl", options.gigabytes * 1e9)
        steps = tokens // (ROW * BATCH) + 2  # a little into the second pass
        size = (folder / "rows.jsonl").stat().st_size / 1e9
        print(f"{size:.2f} GB, {rows:,} rows, {tokens:,} tokens, {steps} steps", flush=True)
        settings += [
            "dataset._component_=tune.datasets.ray" if options.ray else "dataset.streaming=true",
            "packed=true", f"max_seq_len={ROW}", f"global_batch_size={BATCH}",
            f"max_steps={steps}", "micro_batch_size=8", "optimizer.lr=1e-3", f"checkpointer.every={steps // 10}",
        ]  # fmt: skip
        run(settings, folder / "whole", steps, None)
        run(settings, folder / "killed", steps, int(steps * options.kill_at))
        run(settings, folder / "killed", steps, None)
        whole, killed = losses(folder / "whole"), losses(folder / "killed")
        print("the loss curves are", "bitwise equal" if whole == killed else "DIFFERENT")
        sys.exit(whole != killed)


def write_rows(file: Path, size: float) -> tuple[int, int]:
    """Write rows of `size` bytes in total. Returns their number, and their tokens: one per byte, plus an end token."""
    draw, rows, tokens = random.Random(0), 0, 0
    noise = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz     ", k=2 * BALLAST))
    with file.open("w", encoding="utf-8") as output:
        while output.tell() < size:
            numbers = range(rows, rows + draw.randint(1, 12))
            prompt, completion = f"count from {rows}: ", " ".join(map(str, numbers))
            start = draw.randrange(BALLAST)
            row = {"prompt": prompt, "completion": completion, "unused": noise[start : start + BALLAST]}
            output.write(json.dumps(row) + "\n")
            rows, tokens = rows + 1, tokens + len(prompt) + len(completion) + 1
    return rows, tokens


def run(settings: list[str], output: Path, steps: int, kill_at: int | None) -> None:
    """Start or continue the run until it ends, or kill it after a step."""
    first, start = len(lines(output)), time.monotonic()
    launch = Launch([*settings, f"output_dir={output}"], 1)
    peaks: dict[int, float] = {}  # GiB, by tenths of the steps
    while launch.is_running():
        tenth = len(lines(output)) * 10 // steps
        peaks[tenth] = max(peaks.get(tenth, 0.0), memory())
        if kill_at and len(lines(output)) >= kill_at:
            os.killpg(launch.processes[0].pid, signal.SIGKILL)
            break
        time.sleep(1)
    if kill_at is None:
        launch.wait()
    seconds = time.monotonic() - start
    done = lines(output)
    what = "killed" if kill_at else "ended"
    by_tenth = "  ".join(f"{tenth * 10}%: {peak:.2f}" for tenth, peak in sorted(peaks.items()))
    print(f"steps {first + 1} to {len(done)}, {what} after {seconds:.0f} s; peak GiB {by_tenth}", flush=True)


def lines(output: Path) -> list[str]:
    file = output / "metrics.jsonl"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def memory() -> float:
    """Return the GiB of the processes of a run."""
    mark, total = f"{MARK}={os.getpid()}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # the process has ended, or belongs to another user
            if process.name != str(os.getpid()) and mark in (process / "environ").read_bytes().split(b"\0"):
                total += int((process / "smaps_rollup").read_text(encoding="utf-8").split("Pss:")[1].split()[0])
    return total / 2**20


if __name__ == "__main__":
    main()
