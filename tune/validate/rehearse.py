"""Run a recipe file to the end of its first optimizer step, without weights, other processes or results."""

import ast
import builtins
import dis
import functools
import inspect
import io
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import tune
from tune import rehearsal
from tune.distributed import current_world
from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.validate.fake_tensors import FakeWeights
from tune.validate.stand_ins import STAND_INS
from tune.validate.statements import Missing, Statements, Unknown

# Errors because a rehearsal lacks numbers are not the user's.
LIMITS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
LIMITS_IN_WORDS = (".numpy() is not supported for tensor subclasses", "'WeakValueDictionary.__init__")  # of pickle
LIBRARY = str(Path(tune.__file__).parent)
MODULE = "__rehearsed__"


class Uninitialized(TorchFunctionMode):
    """Skips the initialization of parameters on the meta device, for which torch would import its compiler: that takes
    as long as all checks."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        is_init = getattr(function, "__module__", "") == "torch.nn.init"
        if is_init and (tensor := args[0] if args else given["tensor"]).is_meta:
            return tensor
        return function(*args, **given)


class Recipe:
    """A recipe's file as a module, and its function with `@config.entrypoint`.

    Raises:
        TuneError: the file is not Python, raises an error, or has no such function.
    """

    def __init__(self, file: Path):
        self.file = file
        self.module = sys.modules[MODULE] = types.ModuleType(MODULE)
        self.module.__file__ = str(file)
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
            exec(compile(tree, str(file), "exec"), vars(self.module))
        except SyntaxError as error:
            raise TuneError(f"{error.filename}:{error.lineno}: {error.msg}") from error
        except TuneError:
            raise
        except Exception as error:
            raise TuneError(described(error, file)) from error
        functions = [each for each in vars(self.module).values() if hasattr(each, "settings_of_recipe")]
        names = [inspect.unwrap(each).__name__ for each in functions]
        found = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in names]
        if not found:
            raise TuneError(f"{file}: no function has @config.entrypoint(...). Add it to the recipe's main function")
        self.main = found[0]
        self.code = compile(tree, str(file), "exec")

    def missing_settings(self, cfg: DictConfig) -> Iterator[tuple[int, str]]:
        """Yield the lines of the function that read a setting which `cfg` does not have, and what is wrong there.

        A setting whose name the file also has as a string is left out: its code may ask whether it exists.
        """
        argument, text = self.main.args.args[0].arg, self.file.read_text(encoding="utf-8")
        for node in ast.walk(self.main):
            names, value = list[str](), cast(Any, node)
            while isinstance(value, ast.Attribute):
                names, value = [value.attr, *names], value.value
            if not (names and isinstance(value, ast.Name) and value.id == argument):
                continue
            group: Any = cfg
            for at, name in enumerate(names):
                if not isinstance(group, DictConfig) or hasattr(DictConfig, name):
                    break
                if name not in group:
                    key, hint = ".".join(names[: at + 1]), did_you_mean(name, map(str, group))
                    if f'"{name}"' not in text and f"'{name}'" not in text:
                        line = cast(Any, node).lineno
                        place = f"{self.file.name}:{line}"
                        yield line, f"{key}: {place} reads it, and there is no such setting.{hint}"
                    break
                group = group._get_node(name)

    def undefined_names(self) -> Iterator[tuple[int, str]]:
        """Yield the lines of functions that read a name which nothing defines, and what is wrong there.

        A rehearsal does not enter all branches, such as those of later steps.
        """
        known = {*vars(self.module), *vars(builtins)}
        codes = [self.code]
        while codes:
            code = codes.pop()
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            for instruction in dis.get_instructions(code):
                name, positions = instruction.argval, instruction.positions
                if instruction.opname == "LOAD_GLOBAL" and name not in known and positions and positions.lineno:
                    hint = did_you_mean(name, {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *known})
                    yield positions.lineno, f"{self.file.name}:{positions.lineno}: name '{name}' is not defined.{hint}"

    def explained(self, error: Exception) -> TuneError:
        """Return an error of the recipe with its file and line."""
        return error if isinstance(error, TuneError) else TuneError(described(error, self.file))

    def namespace(self, cfg: DictConfig) -> dict[str, Any]:
        """Return the names that the function's statements can read, without their own assignments."""
        return vars(self.module) | {self.main.args.args[0].arg: cfg.copy()}


def rehearse(
    recipe: Recipe, cfg: DictConfig, *, processes: int, rows: int | None, report: Callable[[Exception], None],
    note: Callable[[str], None],
) -> bool:  # fmt: skip
    """Run `recipe` with the settings `cfg` as the first of `processes` processes, and with pipeline stages also as the
    last one.

    Errors go to `report`, and messages of the run to `note`. Returns whether rows of the data were skipped.
    """

    def run(rank: int) -> tuple[bool, int]:
        weights, reported = FakeWeights(), list[Exception]()

        def failed(error: Exception, needs_missing: bool) -> None:
            is_unset = isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError)  # reported already
            follows = isinstance(error, Unknown) or is_unset or (needs_missing and not isinstance(error, TuneError))
            # After another error, a dict may lack the keys that later lines read.
            is_of_text = isinstance(error, KeyError) and any(isinstance(key, str) for key in error.args)
            follows |= is_of_text and bool(reported)
            if not follows and repr(Missing()) not in str(error):
                reported.append(error)
                report(error)

        with process_group(rank) as start, Uninitialized(), closing(weights):
            start(processes)
            report_error = functools.partial(failed, needs_missing=False)
            begun = rehearsal.Rehearsal(report_error, note, rows, weights.made, start, STAND_INS)
            with rehearsed(begun, recipe.file):
                Statements(str(recipe.file), recipe.namespace(cfg), failed).run(recipe.main)
            return bool(begun.cut), current_world().num_stages

    is_cut, stages = run(0)
    if stages > 1:
        run(processes - 1)
    return is_cut


@contextmanager
def rehearsed(begun: rehearsal.Rehearsal, file: Path) -> Iterator[None]:
    """Rehearse the recipe in `file` in this context.

    Nothing is saved or compiled: saving would replace files by tensors without values.
    """
    not_saved, not_compiled = mock.patch("torch.save"), torch.compiler.set_stance("force_eager")
    not_logged = mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)  # tracebacks
    with _told(begun.note, file), rehearsal.start(begun), not_saved, not_compiled, not_logged, torch.enable_grad():
        yield


@contextmanager
def process_group(rank: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that creates a process group of a given size in which only this process exists.

    An existing process group stays.
    """
    is_new = not dist.is_initialized()

    def end() -> None:
        if is_new and dist.is_initialized():
            dist.destroy_process_group()

    def start(processes: int) -> None:
        end()
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=min(rank, processes - 1), world_size=processes)

    try:
        yield start
    finally:
        end()


@contextmanager
def _told(note: Callable[[str], None], file: Path) -> Iterator[None]:
    """Suppress output in this context; warnings of this library and of the user's code become notes."""
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()):
        yield
    for each in caught:
        if each.filename.startswith(LIBRARY) or _is_users(each.filename, file):
            note(f"warning: {each.message}")


def described(error: Exception, file: Path) -> str:
    """Describe an error other than `TuneError`, with the line of the user's code that it comes from."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename, file)]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else file.name
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        near = did_you_mean(str(error.key), map(str, error.parent_node or ()))
        return f"{error.full_key}: {place} reads it, and there is no such setting{near and f'.{near}'}"
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{place}: {type(error).__name__}: {text}"


def is_own(error: Exception, file: Path) -> bool:
    """Return whether the user's code itself raises the error."""
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_users(frames[-1].filename, file)


def is_limit(error: Exception) -> bool:
    """Return whether an error means that a rehearsal lacks numbers."""
    return isinstance(error, LIMITS) or any(text in str(error) for text in LIMITS_IN_WORDS)


def _is_users(name: str, file: Path) -> bool:
    """Return whether a file is the recipe or one of the user's own modules."""
    is_elsewhere = name.startswith((LIBRARY, sys.prefix, sys.base_prefix, "<")) or "site-packages" in name
    return name == str(file) or not is_elsewhere
