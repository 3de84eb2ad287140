"""List run folders with their state, step, loss and size: those in FOLDER (default: runs) and in the folders in it, the
newest last."""

from argparse import ArgumentParser
from datetime import datetime
from pathlib import Path

from tune.cli.output import gib, print_table
from tune.errors import TuneError
from tune.lookup import local_path
from tune.records import find, read

TAIL = 1 << 20  # bytes of metrics.jsonl that are read: the last steps


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune runs [FOLDER]"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=local_path, default=Path("runs"))
    folder = parser.parse_args(arguments).folder
    runs = sorted((read(each, TAIL) for each in find(folder)), key=lambda run: run.started)
    names = ["step", "loss", "validation_loss"]
    if any("reward" in run.columns for run in runs):
        names.append("reward")
    rows = [("run", "state", "recipe", *(name.replace("_", " ") for name in names), "GiB", "began")]
    for run in runs:
        metrics = [run.shown(name) for name in names]
        began = f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M}"
        rows.append((str(run.path), run.state, run.facts.get("recipe", ""), *metrics, gib(run.path), began))
    if len(rows) == 1:
        raise TuneError(f"there are no run folders in {folder}. Give the folder that your runs are in")
    print_table(rows)
