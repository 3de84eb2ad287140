"""Merge ADAPTER into BASE and write the model in Hugging Face layout, one file at a time. Several adapters of the same
layers and rank become one first, as in PEFT."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from tune.cli.convert import new_folder
from tune.errors import TuneError


def main(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("base", metavar="BASE", help="the model folder that the adapter was trained on")
    parser.add_argument("adapter", metavar="ADAPTER", nargs="+", help="a folder in PEFT's layout")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write: absent or empty")
    parser.add_argument("--method", choices=("linear", "ties", "dare_linear", "dare_ties"), help="of several adapters")
    parser.add_argument("--weights", type=float, nargs="+", metavar="W", help="of each adapter (default: 1)")
    parser.add_argument("--density", type=float, help="the share of values that ties and dare keep (default: 0.5)")
    parser.add_argument("--seed", type=int, help="of what dare keeps (default: 0)")
    options = parser.parse_args(arguments)
    names = ("method", "weights", "density", "seed")
    combination = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if (len(options.adapter) > 1) != (options.method is not None) or (combination and not options.method):
        raise TuneError("several adapters need a --method; one adapter is merged as it is, without these options")
    with new_folder(options.out):
        from tune.peft import merge

        merge(options.base, options.adapter, options.out, **combination)
