"""Write an HTML report on one run or several overlaid runs: model, data, curves, samples, and how to use the result. It
opens without a network. A run writes its own report.html when it ends."""

from argparse import ArgumentParser
from pathlib import Path

from tune.lookup import local_path
from tune.records import write_report
from tune.terminal import visible


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune report RUN [RUN ...] [--out FILE]"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=local_path, help="a run folder")
    where = "the page to write (default: report.html in the run folder; for several runs, here)"
    parser.add_argument("--out", metavar="FILE", type=local_path, help=where)
    options = parser.parse_args(arguments)
    folders = [*dict.fromkeys(options.runs)]
    out: Path = options.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    print(visible(f"wrote {out} ({write_report(folders, out) / 2**20:.2f} MiB)"))
