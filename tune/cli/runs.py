"""List run folders with their state, step, loss and size, the newest last. Losses are those of the exported weights:
with checkpointer.keep_best, of the best step. Runs are found in FOLDER (default: runs) and in its subfolders."""

import json
import math
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tune.cli.output import gib, print_table
from tune.errors import TuneError
from tune.lookup import absent, in_shell, local_path
from tune.records import Record, find, is_run, number, read

TAIL = 1 << 20  # bytes to read from the end of metrics.jsonl
TELL = 2.0  # seconds between progress lines


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune runs [FOLDER] [--json]"
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=local_path, default=Path("runs"))
    options = parser.parse_args(arguments)
    folder = options.folder
    runs = sorted(records(find(folder)), key=lambda run: run.started)
    names = ["loss", "validation_loss"]
    if any("reward" in run.columns for run in runs):
        names.append("reward")
    if not runs and not (options.json and folder.is_dir()):
        if not folder.exists():
            raise TuneError(f"{folder} {absent(folder)}. Name the folder of your runs")
        if is_run(folder):
            raise TuneError(f"{folder} is itself a run: `tune watch {in_shell(folder)}`, or name the folder around it")
        raise TuneError(f"there are no run folders in {folder}. Name the folder of your runs")
    if options.json:
        print(json.dumps([described(run) for run in runs], indent=2))
        return
    rows = [("run", "state", "recipe", "step", *(name.replace("_", " ") for name in names), "GiB", "began")]
    for run in runs:
        metrics = [number(run.last("step")), *(run.shown(name) for name in names)]
        began = f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M}"
        rows.append((str(run.path), run.state, run.facts.get("recipe", ""), *metrics, gib(run.path), began))
    print_table(rows)


def records(folders: Sequence[Path]) -> Iterator[Record]:
    """Read the runs in `folders`, and print how many have been read every two seconds."""
    last = time.monotonic()
    for count, folder in enumerate(folders):
        if time.monotonic() - last >= TELL:
            last = time.monotonic()
            print(f"read {count:,} of {len(folders):,} runs", file=sys.stderr, flush=True)
        yield read(folder, TAIL)


def described(run: Record) -> dict[str, Any]:
    """Return a run for JSON output; `metrics` are those of the exported weights, or of a run that is not done the last
    ones. `step` and `time` are always the last."""
    values = {name: run.result(name)[1] for name in run.columns}
    values |= {name: run.last(name) for name in ("step", "time") if name in values}
    return {
        "path": str(run.path),
        "state": run.state,
        "recipe": run.facts.get("recipe", ""),
        "began": datetime.fromtimestamp(run.started).astimezone().isoformat(timespec="seconds"),
        "exported_step": run.exported_step,
        "metrics": {name: None if math.isnan(value) else value for name, value in values.items()},
    }
