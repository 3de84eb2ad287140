"""Import functions and classes by their dotted path, and suggest corrections of misspelled words."""

import difflib
import importlib
import inspect
import logging
import os
import pkgutil
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tune.errors import TuneError, explained
from tune.types import DottedPath


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'lr'?` for the known word closest to `word`; empty if none is as similar as `cutoff` (0 to 1), or
    begins with it."""
    near = _closest(word, known, cutoff)
    return f" Did you mean '{near}'?" if near else ""


def did_you_mean_path(path: Path, pattern: str = "*") -> str:
    """` Did you mean 'runs/mine'?` for the file or folder next to `path` with the closest name; empty if none is."""
    near = _closest(path.name, (each.name for each in path.parent.glob(pattern)))
    return f" Did you mean '{path.with_name(near)}'?" if near else ""


def _closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    spelt = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), spelt, n=1, cutoff=cutoff)
    if not near and len(word) > 2:
        near = sorted((each for each in spelt if each.startswith(word.lower())), key=len)
    return spelt[near[0]] if near else None


def absent(path: Path) -> str:
    """The phrase that `path` does not exist, with the current folder if `path` is relative."""
    return "does not exist" if path.is_absolute() else f"does not exist in {Path.cwd()}"


def local_path(place: str | Path) -> Path:
    """The file or folder that a user named, with `~/` expanded, which shells do not always do.

    A Path is returned unchanged, since it may have been `./~`, the name of a file.
    """
    return Path(os.path.expanduser(place)) if isinstance(place, str) else place


def in_shell(path: Path | str) -> str:
    """A path quoted as one word of a command line."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def assignment(key: str, path: Path | str) -> str:
    """The recipe argument `key=path`; `./` precedes a path that YAML would read as null."""
    return f"{key}={'./' if str(path) in ('', 'null') else ''}{path}"


def is_on_the_hub(path: str) -> bool:
    """Whether a path that does not exist looks like the name of a model or dataset on the Hugging Face hub."""
    return not Path(path).parent.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Wrap imports of packages from an extra of this library, which `what` needs.

    Raises TuneError if they are not installed or incompatible (protobuf's VersionError is a RuntimeError).
    """
    install = f"{what} needs the {extra} extra (pip install 'tune-recipes[{extra}]')"
    with explained(install, ImportError, RuntimeError), quiet_torchao():
        yield


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Suppress torchao's import warnings for its developers, about kernels for other machines and about its enums.

    transformers imports torchao late, so our processes use this from start to end.
    """
    filters: dict[str, Callable[[logging.LogRecord], bool]] = {
        "torchao": lambda record: record.levelno > logging.WARNING,
        "torch.utils._pytree": lambda record: "is an Enum subclass" not in record.msg,
    }
    for name, kept in filters.items():
        logging.getLogger(name).addFilter(kept)
    try:
        yield
    finally:
        for name, kept in filters.items():
            logging.getLogger(name).removeFilter(kept)


_refusals: list[Callable[[str], str]] = []  # in force, each by a `refusing` that has not ended


@contextmanager
def refusing(refusal: Callable[[str], str]) -> Iterator[None]:
    """Within this context, `locate` imports no path for which `refusal` returns a reason."""
    _refusals.append(refusal)
    try:
        yield
    finally:
        _refusals.remove(refusal)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress warnings of libraries for their own users: the user of a verb has not called them. Their errors, and
    warnings of `tune`, are shown."""
    loggers = [logging.getLogger(name) for name in ("transformers", "bitsandbytes", "compressed_tensors", "peft")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    is_set = "TRANSFORMERS_VERBOSITY" in os.environ
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers sets its level when it is imported
    try:
        with quiet_torchao(), warnings.catch_warnings():
            names = "|".join([*(logger.name for logger in loggers), "torch", "torchao", "accelerate"])
            warnings.filterwarnings("ignore", module=rf"({names})(\.|$)")
            yield
    finally:
        if not is_set:
            del os.environ["TRANSFORMERS_VERBOSITY"]
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def locate(path: DottedPath) -> Callable[..., Any]:
    """Import the function or class with this dotted path. Raises TuneError if that fails, if it is part of Python's
    standard library, which has no components, or if a `refusing` context forbids it."""
    for refusal in _refusals:
        if reason := refusal(path):
            raise TuneError(reason)
    first, *names = path.split(".")
    if not names or not all(name.isidentifier() for name in (first, *names)):
        hint = "" if names else f" Include its module: my_module.{path}"
        if re.fullmatch(r"[\w.]+?(\.py)?:\w+", path):
            hint = f" Write {path.replace('.py:', '.').replace(':', '.')}."
        raise TuneError(f"'{path}' is not the dotted path of a function or class.{hint}")
    if first in sys.stdlib_module_names:
        raise _of_python(path)
    found: Any = _import(first, path)
    for name in names:
        child = getattr(found, name, None)
        if child is None and isinstance(found, ModuleType):
            child = _import(f"{found.__name__}.{name}", path, missing_in=found)
        if child is None:
            modules = [each.name for each in pkgutil.iter_modules(getattr(found, "__path__", None) or [])]
            known = [each for each in [*modules, *dir(found)] if not each.startswith("_")]
            own = [each for each in known if getattr(getattr(found, each, None), "__module__", "") == found.__name__]
            has = f" It has {', '.join(own)}." if 0 < len(own) < 10 else ""
            raise TuneError(f"{found.__name__} has no '{name}'.{did_you_mean(name, known) or has}")
        found = child
    if not callable(found):
        what = "a module, not" if isinstance(found, ModuleType) else "not"
        raise TuneError(f"'{path}' is {what} a function or class.")
    if _module_of(found).partition(".")[0] in sys.stdlib_module_names:
        raise _of_python(path)
    return found


def _module_of(found: Any) -> str:
    """The module that defines a function or class; for other callables, such as a partial function, ""."""
    if not (inspect.isroutine(found) or inspect.isclass(found)):
        return ""
    owner = getattr(found, "__self__", None)  # of a method written in C, which may not name its module
    return str(getattr(found, "__module__", None) or type(owner).__module__)


def _of_python(path: str) -> TuneError:
    return TuneError(
        f"'{path}' is part of Python's standard library, not a component. Name a class or function of tune, torch, "
        "another library or your own module."
    )


def _import(name: str, path: str, missing_in: ModuleType | None = None) -> ModuleType | None:
    try:
        with quiet_torchao():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name and missing_in:
            return None
        torchao = "It comes with: pip install 'tune-recipes[torchao]'"
        near = did_you_mean(str(error.name), ["tune"])
        hint = torchao if error.name == "torchao" else f"Is it installed, or in the current folder?{near}"
        place = "" if error.name == name else f"{path}: "
        raise TuneError(f"{place}there is no module '{error.name}'. {hint}") from error
    except SyntaxError as error:
        raise TuneError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except Exception as error:  # running a module can raise anything
        raise TuneError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
