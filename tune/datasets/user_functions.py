"""Call functions that a config names by their dotted path."""

import ast
import hashlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path
from typing import Any

from tune.errors import TuneError, explained
from tune.lookup import locate

COLUMNS_SHOWN = 12
INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def load_function(path: str, asked: str) -> Callable[..., Any]:
    """Import the user's function with this dotted path; `asked` is the setting that names it, for messages."""
    with explained(asked):
        return locate(path)


def sources_of(path: str, asked: str) -> dict[str, str]:
    """A hash of the source file of each module that the function needs, including indirect imports.

    Imports of installed packages are not followed; their version counts instead. The function's attribute `depends_on`
    lists other inputs: files, which may be relative to the function's own file, and `$NAME` for environment variables.
    Raises TuneError if such a file does not exist.
    """
    function = inspect.unwrap(load_function(path, asked))
    depends_on = [str(each) for each in getattr(function, "depends_on", ())]
    folder = Path(inspect.getfile(function)).parent if depends_on else Path()
    waiting = deque([path.rpartition(".")[0], str(getattr(function, "__module__", ""))])
    found = {name: _dependency(name, folder, asked) for name in depends_on}
    while waiting:
        name = waiting.popleft()
        try:
            spec = find_spec(name) if name and name not in found else None
        except (ImportError, ValueError):  # not a module, but a name in one
            continue
        if spec is None or not spec.has_location:
            continue
        file = Path(str(spec.origin))
        source = file.read_bytes()
        version = getattr(sys.modules.get(name.partition(".")[0]), "__version__", "")
        found[name] = f"{hashlib.blake2b(source).hexdigest()} {version}"
        if file.suffix == ".py" and not any(file.is_relative_to(folder) for folder in INSTALLED):
            waiting += _imported(source, name if spec.submodule_search_locations else name.rpartition(".")[0])
    return found


def _dependency(name: str, folder: Path, asked: str) -> str:
    if name.startswith("$"):
        return repr(os.environ.get(name[1:]))
    for file in (Path(name).expanduser(), folder / name):
        if file.is_file():
            return hashlib.blake2b(file.read_bytes()).hexdigest()
    raise TuneError(f"{asked}: depends_on lists {name}, but there is no such file here or in {folder}")


def _imported(source: bytes, package: str) -> Iterator[str]:
    """The modules that `source` imports, their packages, and the imported names, which may be modules themselves."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{module}.{each.name}" for each in node.names]
        else:
            continue
        for name in names:
            yield from accumulate(name.split("."), "{}.{}".format)


def applied(path: str, setting: str, row: dict[str, Any]) -> Any:
    """The result of the user's function with this path for a row."""
    columns = ", ".join(list(row)[:COLUMNS_SHOWN]) + (", ..." if len(row) > COLUMNS_SHOWN else "")
    return called(f"{path} fails on this row (columns {columns})", load_function(path, setting), row)


def called(what: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call the user's function. If it raises, raises a TuneError that begins with `what` and names the line."""
    try:
        found = function(*given)
    except TuneError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [each for each in frames if not any(Path(each.filename).is_relative_to(folder) for folder in INSTALLED)]
        place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        raise TuneError(f"{what}: {type(error).__name__}: {error}{place}") from error
    if inspect.iscoroutine(found):
        found.close()
        raise TuneError(f"{what}: the function is async, but is not awaited. Call asyncio.run inside it")
    return found
