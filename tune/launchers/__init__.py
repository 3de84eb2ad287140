"""Launchers start a recipe in several processes: one module each, found by name (`tune run --launcher NAME`).

A launcher is a module with `launch(options, recipe, settings, folder)`. Its processes run the recipe as a script with
`settings` as command line, and set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `folder` is the run
folder, the same on every attempt. `options` are the options that the user gave before the recipe.
"""

import importlib
import pkgutil
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path

from tune.errors import TuneError
from tune.lookup import did_you_mean

Launch = Callable[[Sequence[str], Path, Sequence[str], Path], None]


def launcher(name: str) -> Launch:
    """Return the `launch` function of a launcher. Raises TuneError if the name is unknown."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    if name not in names:
        raise TuneError(
            f"--launcher: unknown launcher '{name}'.{did_you_mean(name, names)} Available: {', '.join(names)}"
        )
    launch: Launch = importlib.import_module(f"tune.launchers.{name}").launch
    return launch


def count(text: str, least: int = 1) -> int:
    """Parse an option that is a count of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"'{text}' is not a number of at least {least}")
    return int(text)
