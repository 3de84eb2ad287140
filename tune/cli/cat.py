"""`tune cat`: print a recipe or a config."""

import argparse
import sys
from collections.abc import Sequence

from tune.cli.shipped import find


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="tune cat", description="Print a recipe or a config.")
    parser.add_argument("name", metavar="NAME", help="a recipe (full_finetune) or a config (full_finetune.yaml)")
    sys.stdout.write(find(parser.parse_args(arguments).name).read_text())
