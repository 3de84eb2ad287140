"""Print a recipe or a config."""

import sys
from argparse import ArgumentParser

from tune.cli.recipes import find


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("name", metavar="NAME", help="a recipe (full_finetune) or a config (full_finetune.yaml)")
    sys.stdout.write(find(parser.parse_args(arguments).name).read_text(encoding="utf-8"))
