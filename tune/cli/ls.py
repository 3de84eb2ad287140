"""List the recipes and configs, each with a one-line description. With RECIPE, list all its settings: its YAML, and the
other arguments of its components, and of the functions that it passes a group to.

    tune ls
    tune ls full_finetune
"""

import ast
import inspect
import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, get_origin

from tune import config
from tune.cli.recipes import recipe_of
from tune.types import is_plain, show


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe, or your own script")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.recipe:
        default = config.find_config(recipe_of(options.recipe, [])[0])
        if options.json:
            print(json.dumps(settings_of(default), indent=2, default=str))
        else:
            show_settings(default)
        return
    recipes, configs = {}, {}
    for name in config.list_recipes():
        docstring = ast.get_docstring(ast.parse(config.find_recipe(name).read_text(encoding="utf-8"))) or ""
        recipes[name] = docstring.partition("\n")[0]
    for name in config.list_configs():
        lines = config.find_config(name).read_text(encoding="utf-8").splitlines()
        configs[f"{name}.yaml"] = next((line.lstrip("# ") for line in lines if line.startswith("#")), "")
    if options.json:
        print(json.dumps({"recipes": recipes, "configs": configs}, indent=2))
        return
    width = max(map(len, [*recipes, *configs]))
    for title, descriptions in {"Recipes": recipes, "Configs": configs}.items():
        print(f"{title}:")
        for name, description in descriptions.items():
            print(f"  {name:<{width}}  {description}")


def show_settings(default: Path) -> None:
    """Print a recipe's YAML, then the arguments of components and functions that the YAML leaves out."""
    print(default.read_text(encoding="utf-8"))
    for key, (path, arguments) in others(default).items():
        print(f"# {key}: {path} also takes")
        print("\n".join(f"#   {key}.{name}={show(value)}" for name, value in arguments.items()))


def settings_of(default: Path) -> dict[str, Any]:
    """Return all settings of a recipe with their defaults, by dotted keys."""
    values = config.read_file(default)
    more = {f"{key}.{name}": value for key, (_, found) in others(default).items() for name, value in found.items()}
    return config.flat(values) | more


def others(default: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return, for each group of settings in the YAML `default`, its component or function, and the other optional
    arguments of that with their defaults.

    Arguments whose type YAML cannot express are left out, and so are those that another recipe lists in its YAML.
    """
    values = config.read_file(default)
    script = config.find_script(default)
    groups: dict[str, Any] = dict(config.groups_of(script, values)) if script else {}
    for key, group in values.items():
        if isinstance(group, dict) and "_component_" in group:
            path = str(group["_component_"])
            groups[key] = (path, config.signature_of(path).parameters)
    files = map(config.find_config, config.list_recipes_with_settings())
    of_others = {key for file in files for key in config.flat(config.read_file(file))}
    found = {}
    for key in filter(groups.__contains__, values):
        path, parameters = groups[key]
        arguments = {
            name: _default(parameter)
            for name, parameter in parameters.items()
            if name not in {*values[key], *values}
            and ("_component_" in values[key] or f"{key}.{name}" not in of_others)
            and parameter.default is not inspect.Parameter.empty
            and is_plain(parameter.annotation)
        }
        if arguments:
            found[key] = (path, arguments)
    return found


def _default(parameter: inspect.Parameter) -> Any:
    """Return an argument's default as YAML writes it; for a dataclass field, the value of its factory."""
    default = parameter.default
    if repr(default) == "<factory>":  # a dataclass keeps the factory elsewhere
        default = {} if get_origin(parameter.annotation) is dict else []
    return list(default) if isinstance(default, tuple) else default
