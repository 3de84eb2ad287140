"""`tune cp`: copy a recipe or a config to change it."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from tune.cli.shipped import find
from tune.errors import TuneError


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="tune cp", description="Copy a recipe or a config to change it.")
    parser.add_argument("name", metavar="NAME", help="a recipe (full_finetune) or a config (full_finetune.yaml)")
    parser.add_argument(
        "destination", metavar="DEST", nargs="?", type=Path, default=Path(), help="a file or a folder (default: here)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite DEST")
    options = parser.parse_args(arguments)

    source = find(options.name)
    target: Path = options.destination
    if target.is_dir():
        target = target / source.name
    elif target.suffix != source.suffix:
        raise TuneError(f"{target}: {source.name} is copied to a {source.suffix} file or into a folder that exists.")
    if target.exists() and not options.force:
        raise TuneError(f"{target} exists already. Name another file, or overwrite it with --force.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    print(f"copied {source.name} to {target}")
