"""List the checkpoints of a run: size, metrics and the best one; with --verify, also damaged ones."""

import re
from argparse import ArgumentParser
from pathlib import Path

from tune.cli.output import gib, print_table
from tune.errors import TuneError
from tune.lookup import local_path
from tune.records import number, read


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("run", metavar="RUN", type=local_path, help="a run folder")
    parser.add_argument("--verify", action="store_true", help="read all files and report damaged checkpoints")
    options = parser.parse_args(arguments)
    path = options.run
    run = read(path)
    shown = {"loss", "reward", run.settings.get("checkpointer.keep_best")}
    prefixes = "validation_", *(f"{Path(each).stem}/" for each in run.settings.get("evaluate.tasks") or ())
    metrics = [name for name in run.columns if name in shown or name.startswith(prefixes)]
    rows = [["checkpoint", "GiB", "", *metrics]]
    for folder in sorted(path.glob("checkpoints/*"), key=lambda folder: folder.name.lstrip(".")):
        if name := re.match(r"(\.?)step-(\d+)", folder.name):
            values = ("".join(map(number, known[steps == int(name[2])])) for steps, known in map(run.known, metrics))
            state = "best" if int(name[2]) == run.best else "complete"
            if name[1]:
                state = "unfinished"
            elif options.verify and _is_damaged(folder):
                state = "damaged"
            rows.append([folder.name, gib(folder), state, *values])
    if len(rows) == 1:
        raise TuneError(f"{path} has no checkpoints yet: checkpointer.every sets how often one is written")
    print_table(rows)


def _is_damaged(checkpoint: Path) -> bool:
    from tune.checkpointers import found_damage  # torch takes seconds to import

    return found_damage(checkpoint) != ""
