"""`tune cp`: copy a recipe with its settings, or a config alone, to change it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tune import config
from tune.cli.shipped import find
from tune.errors import TuneError


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tune cp", description="Copy a recipe with its settings, or a config alone, to change it."
    )
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
    copies = {target: source}
    if source.suffix == ".py":
        copies[target.with_suffix(".yaml")] = config.find_config(source.stem)
    if not options.force and (there := [copy for copy in copies if copy.exists()]):
        raise TuneError(f"{there[0]} exists already. Name another file, or overwrite it with --force.")
    target.parent.mkdir(parents=True, exist_ok=True)
    for copy, original in copies.items():
        text = original.read_text()
        for old, new in _names(source.stem, target) if len(copies) > 1 else ():
            text = text.replace(old, new)
        copy.write_text(text)
        print(f"copied {original.name} to {copy}")
    if len(copies) > 1:
        print(f"{target} reads its settings from {copy}: a key that you add there is a setting at once")


def _names(recipe: str, target: Path) -> list[tuple[str, str]]:
    """How a recipe names itself, and how its copy does."""
    return [
        (f'"{recipe}"', f'"{target.stem}"'),
        (f"recipes/{recipe}.py", str(target)),
        (f"configs/{recipe}.yaml", str(target.with_suffix(".yaml"))),
        (f" {recipe} --config", f" {target} --config"),
    ]
