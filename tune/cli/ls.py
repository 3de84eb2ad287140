"""List the recipes and presets: recipes with the first line of their docstring, configs with their first comment.
With RECIPE, list all its settings: its YAML, and the other arguments that its components take.

    tune ls
    tune ls full_finetune
"""

import ast
import inspect
from argparse import ArgumentParser
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_origin

from tune import config
from tune.cli.recipes import recipe_of
from tune.types import is_plain, show


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe, or a script of your own")
    if recipe := parser.parse_args(arguments).recipe:
        show_settings(recipe)
        return
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


def show_settings(recipe: str) -> None:
    """The YAML of a recipe as it stands, then for each component the arguments that are not in it."""
    default, _ = recipe_of(recipe, [])
    print(Path(config.find_config(default)).read_text(encoding="utf-8"))
    values = config.read_file(config.find_config(default))
    for key, group in values.items():
        if (
            isinstance(group, dict)
            and (path := group.get("_component_"))
            and (lines := others(str(path), {*group, *values}))
        ):
            print(f"# {key}: {path} also takes")
            print("\n".join(f"#   {key}.{line}" for line in lines))


def others(path: str, given: Collection[str]) -> list[str]:
    """The optional arguments of a component that are not `given`, as far as a YAML has values for them."""
    parameters = config.signature_of(path).parameters
    return [
        f"{name}={show(_default(parameter))}"
        for name, parameter in parameters.items()
        if name not in given and parameter.default is not inspect.Parameter.empty and is_plain(parameter.annotation)
    ]


def _default(parameter: inspect.Parameter) -> Any:
    """The default of an argument as YAML has it: of a field of a dataclass, what its factory makes."""
    default = parameter.default
    if repr(default) == "<factory>":  # of dataclasses, which keep the factory elsewhere
        default = {} if get_origin(parameter.annotation) is dict else []
    return list(default) if isinstance(default, tuple) else default
