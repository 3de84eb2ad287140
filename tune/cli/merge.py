"""Merge ADAPTER into BASE and write the model in Hugging Face layout, one file at a time."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from tune.cli.convert import new_folder


def main(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("base", metavar="BASE", help="the model folder that the adapter was trained on")
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder in PEFT's layout")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write: absent or empty")
    options = parser.parse_args(arguments)
    with new_folder(options.out):
        from tune.peft import merge

        merge(options.base, options.adapter, options.out)
