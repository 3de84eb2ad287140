"""List the recipes and presets: recipes with the first line of their docstring, configs with their first comment."""

import ast
from argparse import ArgumentParser

from tune import config


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.parse_args(arguments)
    recipes, configs = {}, {}
    for name in config.list_recipes():
        docstring = ast.get_docstring(ast.parse(config.find_recipe(name).read_text(encoding="utf-8"))) or ""
        recipes[name] = docstring.partition("\n")[0]
    for name in config.list_configs():
        lines = config.find_config(name).read_text(encoding="utf-8").splitlines()
        configs[f"{name}.yaml"] = next((line.lstrip("# ") for line in lines if line.startswith("#")), "")
    width = max(map(len, [*recipes, *configs]))
    for title, descriptions in {"Recipes": recipes, "Configs": configs}.items():
        print(f"{title}:")
        for name, description in descriptions.items():
            print(f"  {name:<{width}}  {description}")
