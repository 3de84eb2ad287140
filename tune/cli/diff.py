"""Compare two runs: recipe, settings, data, and each metric of the exported weights (before a run is done, its last
value). A dash marks a value that a run does not have."""

import math
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

from tune.cli.output import print_table
from tune.lookup import local_path
from tune.records import Record, differences, number, read
from tune.terminal import visible
from tune.types import as_given, show


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("runs", metavar="RUN", nargs=2, type=local_path, help="a run folder")
    runs = [read(path) for path in parser.parse_args(arguments).runs]
    for problem in [f"{run.path}: {each}" for run in runs for each in run.problems]:
        print(visible(f"warning: {problem}"), file=sys.stderr)
    results = [results_of(run) for run in runs]
    rows = [["", *(str(run.path) for run in runs)]]
    inputs, recipes = [run.inputs for run in runs], [str(run.facts.get("recipe", "")) for run in runs]
    if recipes[0] != recipes[1]:
        rows.append(["recipe", *recipes])
    for title, values in {"settings and data": inputs, "result": results}.items():
        written = number if title == "result" else as_given
        found = [[f"  {key}", *cells(key, values, written)] for key, _ in differences(values)]
        rows += [[title if found else f"{title}: no difference", "", ""], *found]
    print_table(rows)


def results_of(run: Record) -> dict[str, float]:
    values = {name: run.result(name)[1] for name in run.columns if name != "time"}
    values["step"] = run.last("step")
    if run.exported_step is not None:
        values["exported step"] = run.exported_step
    return {name: value for name, value in values.items() if not math.isnan(value)}


def cells(key: str, values: Sequence[dict[str, Any]], written: Callable[[Any], str]) -> list[str]:
    """Return each run's value of `key`, with all digits if rounded values would be equal."""
    found = [written(each[key]) if key in each else "-" for each in values]
    return found if len({*found}) > 1 else [show(each[key]) for each in values]
