"""Print a recipe or a config."""

import sys
from argparse import ArgumentParser
from pathlib import Path

from tune import config
from tune.errors import TuneError


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("name", metavar="NAME", help="a recipe (full_finetune) or a config (full_finetune.yaml)")
    sys.stdout.write(find(parser.parse_args(arguments).name).read_text(encoding="utf-8"))


def find(name: str) -> Path:
    """The file of a recipe, or of a config: its name may lack .yaml where no recipe has that name."""
    is_config = name.endswith(".yaml") or name in {*config.list_configs()} - {*config.list_recipes()}
    try:
        return config.find_config(name) if is_config else config.find_recipe(name)
    except TuneError as error:
        others = ", ".join(config.list_recipes() if is_config else [f"{each}.yaml" for each in config.list_configs()])
        raise TuneError(f"{error} The {'recipes' if is_config else 'configs'} are {others}.") from error
