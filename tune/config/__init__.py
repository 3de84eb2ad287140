"""A recipe's settings: YAML defaults, `--config` files and `key=value`, checked before anything heavy is imported."""

from tune.config.entry import check_early, entrypoint
from tune.config.instantiate import instantiate
from tune.config.load import load, save
from tune.config.paths import find_config, find_default, find_recipe, list_configs, list_recipes

__all__ = [
    "check_early",
    "entrypoint",
    "find_config",
    "find_default",
    "find_recipe",
    "instantiate",
    "list_configs",
    "list_recipes",
    "load",
    "save",
]
