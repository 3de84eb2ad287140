"""Show in what two runs differ: recipe, settings, data, and the last value of each metric. A dash stands for what a run
does not have."""

import sys
from argparse import ArgumentParser

from tune.cli.runs import print_table
from tune.lookup import local_path
from tune.records import differences, number, read
from tune.type_check import as_given


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("runs", metavar="RUN", nargs=2, type=local_path, help="a run folder")
    runs = [read(path) for path in parser.parse_args(arguments).runs]
    for problem in [f"{run.path}: {each}" for run in runs for each in run.problems]:
        print(f"warning: {problem}", file=sys.stderr)
    results = [{name: number(run.last(name)) for name in run.columns if name != "time"} for run in runs]
    rows = [["", *(str(run.path) for run in runs)]]
    inputs, recipes = [run.inputs for run in runs], [str(run.facts.get("recipe", "")) for run in runs]
    if recipes[0] != recipes[1]:
        rows.append(["recipe", *recipes])
    for title, values in {"settings and data": inputs, "result": results}.items():
        found = [
            [f"  {key}", *(as_given(each[key]) if key in each else "-" for each in values)]
            for key, _ in differences(values)
        ]
        rows += [[title if found else f"{title}: no difference", "", ""], *found]
    print_table(rows)
