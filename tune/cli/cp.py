"""Copy a recipe and its settings, or only a config, to change it."""

from argparse import ArgumentParser
from pathlib import Path

from tune import config
from tune.cli.recipes import find
from tune.errors import TuneError
from tune.lookup import local_path


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("name", metavar="NAME", help="a recipe (full_finetune) or a config (full_finetune.yaml)")
    where = "a file or a folder (default: here)"
    parser.add_argument("destination", metavar="DEST", nargs="?", type=local_path, default=Path(), help=where)
    parser.add_argument("--force", action="store_true", help="overwrite DEST")
    options = parser.parse_args(arguments)

    source = find(options.name)
    target: Path = options.destination
    if target.is_dir():
        target = target / source.name
    elif target.suffix != source.suffix:
        raise TuneError(f"{target}: {source.name} can be copied to a {source.suffix} file or into an existing folder.")
    copies, names = {target: source}, {}
    settings = target.with_suffix(".yaml")
    has_settings = source.suffix == ".py" and source.stem in config.list_recipes_with_settings()
    if source.suffix == ".py":
        names = {f"recipes/{source.name}": str(target)}  # names of the recipe in its own text
    if has_settings:
        copies[settings] = config.find_config(source.stem)
        names |= {
            f'"{source.stem}"': f'"{target.stem}"',
            f"configs/{source.stem}.yaml": str(settings),
            f" {source.stem} --config": f" {target} --config",
            f"`tune ls {source.stem}`": f"`tune ls {target}`",
        }
    if not options.force and (there := [copy for copy in copies if copy.exists()]):
        raise TuneError(f"{there[0]} already exists. Name another file, or overwrite it with --force.")
    target.parent.mkdir(parents=True, exist_ok=True)
    for copy, original in copies.items():
        text = original.read_text(encoding="utf-8")
        for old, new in names.items():
            text = text.replace(old, new)
        copy.write_text(text, encoding="utf-8")
        print(f"copied {original.name} to {copy}")
    if has_settings:
        print(f"{target} reads its settings from {settings}: each key you add there is a new setting")
