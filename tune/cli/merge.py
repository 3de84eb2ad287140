"""`tune merge`: an adapter into its base."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tune.cli.convert import check_absent
from tune.errors import TuneError


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tune merge",
        description="Write the model that BASE with ADAPTER is, a file at a time, in Hugging Face layout.",
    )
    parser.add_argument("base", metavar="BASE", help="the model folder that the adapter was trained on")
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder in PEFT's layout")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write: absent or empty")
    options = parser.parse_args(arguments)
    check_absent(options.out)
    try:
        from tune.peft import merge

        merge(options.base, options.adapter, options.out)
    except OSError as error:
        raise TuneError(f"{error.filename or options.out}: {error.strerror}") from error
    print(f"wrote {options.out}")
