"""A recipe's settings: YAML defaults, `--config` files and `key=value`, checked before data or weights are read."""

from tune.config.arguments import groups_of, types_of_settings
from tune.config.check import combine
from tune.config.entry import entrypoint
from tune.config.instantiate import COMPONENT, instantiate, instantiate_weighted
from tune.config.less_memory import less_memory
from tune.config.load import all_problems, flat, load, notes, read, read_file, save, saved
from tune.config.paths import (
    find_config,
    find_default,
    find_recipe,
    find_script,
    list_configs,
    list_recipes,
    list_recipes_with_settings,
    local_folder,
)
from tune.config.signature import signature_of
from tune.config.text import Layer, parse

# Other names are internal to `tune`.
__all__ = [
    "entrypoint",
    "find_config",
    "find_default",
    "find_recipe",
    "flat",
    "instantiate",
    "instantiate_weighted",
    "list_configs",
    "list_recipes",
    "list_recipes_with_settings",
    "load",
    "local_folder",
    "notes",
    "read",
    "read_file",
    "save",
    "saved",
]
