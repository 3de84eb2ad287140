"""Build what a config names with `_component_`."""

import importlib
import inspect
import keyword
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from tune.config.paths import did_you_mean
from tune.errors import TuneError

COMPONENT = "_component_"


def instantiate(node: DictConfig | Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call `node._component_` with `args`, the other keys of `node` (as plain lists and dicts), and `kwargs`.

    A key that is a Python keyword goes to the parameter with an underscore behind it: `async` to `async_`. What the
    component finds wrong is said with the place of `node` in the settings.
    """
    values: dict[str, Any] = dict(node)
    if isinstance(node, DictConfig):
        values = cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))
    if (path := values.pop(COMPONENT, None)) is None:
        raise TuneError(f"a component needs the key {COMPONENT}, the dotted path of a function or class: {values}")
    component = locate(path)
    given = {f"{key}_" if keyword.iskeyword(key) else key: value for key, value in values.items()}
    twice = sorted(given.keys() & kwargs.keys())
    if twice:
        raise TuneError(f"{path}: {', '.join(twice)} is given by the recipe: remove it from the configuration")
    try:
        inspect.signature(component).bind(*args, **given, **kwargs)
    except TypeError as error:
        raise TuneError(f"{path} cannot be called so: {error}") from error
    try:
        return component(*args, **given, **kwargs)
    except TuneError as error:
        key = node._get_full_key(None) if isinstance(node, DictConfig) else ""
        if not key or str(error).startswith(key):
            raise
        raise TuneError(f"{key}: {error}") from error
    except (ValueError, AssertionError) as error:
        if not component.__module__.startswith("torch"):
            raise  # in code of ours or the user's it may be a mistake of that code
        raise TuneError(f"{path} does not take these arguments: {error}") from error


def locate(path: str) -> Callable[..., Any]:
    """Import the function or class with this dotted path."""
    first, *names = path.split(".")
    found: Any = _import(first, path)
    for name in names:
        if not hasattr(found, name) and isinstance(found, ModuleType):
            _import(f"{found.__name__}.{name}", path, missing_in=found)
        if not hasattr(found, name):
            raise TuneError(f"{path}: {found.__name__} has no '{name}'.{did_you_mean(name, dir(found))}")
        found = getattr(found, name)
    if not callable(found):
        raise TuneError(f"{path} is not a function or class.")
    return found


def _import(name: str, path: str, missing_in: ModuleType | None = None) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name and missing_in:
            return None
        hint = "Is it installed, or in the current folder?"
        raise TuneError(f"{path}: there is no module '{error.name}'. {hint}") from error
    except ImportError as error:
        raise TuneError(f"{path} cannot be imported: {error}") from error
