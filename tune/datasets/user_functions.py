"""Functions that a config names by their dotted path."""

import hashlib
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from tune.errors import TuneError


def load_function(path: str, asked: str) -> Callable[..., Any]:
    """The user's function with this dotted path; `asked` is the setting that names it, for messages."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise TuneError(f"{asked}: a function is named with its module: my_data.{path}")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise TuneError(f"{asked}: {module_name} cannot be imported: {error}") from error
        raise TuneError(
            f"{asked}: there is no module {error.name!r}. Is {error.name}.py installed, or in the current folder?"
        ) from error
    except Exception as error:  # whatever the user's file does when it is run
        raise TuneError(f"{asked}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        close = get_close_matches(name, dir(module), n=1)
        hint = f" Did you mean {module_name}.{close[0]}?" if close else ""
        raise TuneError(f"{asked}: {module_name} has no function {name!r}.{hint}")
    return function


def source_of(path: str, asked: str) -> str:
    """A hash of the file that the function is written in."""
    file = inspect.getsourcefile(inspect.unwrap(load_function(path, asked)))
    return hashlib.blake2b(Path(file).read_bytes()).hexdigest() if file else path
