"""`tune ls`: the recipes and presets there are, one line each."""

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path

from tune import config


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="tune ls", description="List the recipes and configs.").parse_args(arguments)
    recipes = {name: docstring_line(config.find_recipe(name)) for name in config.list_recipes()}
    configs = {f"{name}.yaml": comment_line(config.find_config(name)) for name in config.list_configs()}
    width = max(map(len, [*recipes, *configs]))
    for title, lines in {"Recipes": recipes, "Configs": configs}.items():
        print(f"{title}:")
        for name, line in lines.items():
            print(f"  {name:<{width}}  {line}")


def docstring_line(recipe: Path) -> str:
    """The first line of a script's docstring."""
    return (ast.get_docstring(ast.parse(recipe.read_text())) or "").partition("\n")[0]


def comment_line(preset: Path) -> str:
    """The first comment of a YAML file."""
    comments = (line for line in preset.read_text().splitlines() if line.startswith("#"))
    return next(comments, "").lstrip("# ")
