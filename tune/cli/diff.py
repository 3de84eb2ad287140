"""Show in what two runs differ: settings, data, and the last value of each metric."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from tune.cli.runs import print_table
from tune.records import differences, number, read


def main(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("runs", metavar="RUN", nargs=2, type=Path, help="a run folder")
    runs = [read(path) for path in parser.parse_args(arguments).runs]
    results = [{name: number(run.last(name)) for name in run.columns if name != "time"} for run in runs]
    rows = [["", *(str(run.path) for run in runs)]]
    for title, values in {"settings and data": [run.inputs for run in runs], "result": results}.items():
        found = [[f"  {key}", *map(str, pair)] for key, pair in differences(values)]
        rows += [[title if found else f"{title}: no difference", "", ""], *found]
    print_table(rows)
