"""A recipe, any file, run to the end of its first optimizer step: without weights, other processes or results."""

import ast
import functools
import inspect
import io
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
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
from tune.validate.fake_tensors import FakeWeights
from tune.validate.stand_ins import STAND_INS
from tune.validate.statements import Missing, Statements, Unknown

# What fails for want of numbers is no mistake.
LIMITS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
LIMITS_IN_WORDS = (".numpy() is not supported for tensor subclasses", "'WeakValueDictionary.__init__")  # of pickle
LIBRARY = str(Path(tune.__file__).parent)
MODULE = "__rehearsed__"


class Uninitialised(TorchFunctionMode):
    """Parameters on the meta device are not initialised: to do so there, torch imports its compiler, which takes as
    long as all checks."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        is_init = getattr(function, "__module__", "") == "torch.nn.init"
        if is_init and (tensor := args[0] if args else given["tensor"]).is_meta:
            return tensor
        return function(*args, **given)


class Recipe:
    """The module that a recipe's file makes, and its function with `@config.entrypoint`.

    Raises:
        TuneError: it is no Python, it raises an error, or it has no such function.
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
            raise TuneError(f"{file}: no function of it has @config.entrypoint(...)")
        self.main = found[0]

    def explained(self, error: Exception) -> TuneError:
        """An error of the recipe, with the line that it comes from."""
        return error if isinstance(error, TuneError) else TuneError(described(error, self.file))

    def namespace(self, cfg: DictConfig) -> dict[str, Any]:
        """The names that the statements of the function see, without those that they make."""
        return vars(self.module) | {self.main.args.args[0].arg: cfg.copy()}


def rehearse(
    recipe: Recipe, cfg: DictConfig, *, processes: int, rows: int | None, report: Callable[[Exception], None],
    note: Callable[[str], None],
) -> bool:  # fmt: skip
    """Run `recipe` with the settings `cfg` as the first of so many processes, and where they are stages of a pipeline
    as the last one too. Errors go to `report`, and what a run would say to `note`. Returns whether rows of the data
    were left out."""

    def run(rank: int) -> tuple[bool, int]:
        weights = FakeWeights()

        def failed(error: Exception, needs_missing: bool) -> None:
            is_unset = isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError)  # reported already
            follows = isinstance(error, Unknown) or is_unset or (needs_missing and not isinstance(error, TuneError))
            if not follows and repr(Missing()) not in str(error):
                report(error)

        with process_group(rank) as start, Uninitialised(), closing(weights):
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
    """The recipe in `file` is rehearsed within. What its own lines save would replace what is there by tensors without
    values: nothing is saved, nor compiled."""
    not_saved, not_compiled = mock.patch("torch.save"), torch.compiler.set_stance("force_eager")
    with _told(begun.note, file), rehearsal.start(begun), not_saved, not_compiled, torch.enable_grad():
        yield


@contextmanager
def process_group(rank: int) -> Iterator[Callable[[int], None]]:
    """A function that makes a process group of so many processes, of which only this one is there. One that is there
    already stays."""
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
    """Nothing is printed within; warnings of this library and of the user's code are notes."""
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()):
        yield
    for each in caught:
        if each.filename.startswith(LIBRARY) or _is_users(each.filename, file):
            note(f"warning: {each.message}")


def described(error: Exception, file: Path) -> str:
    """What an error that is no `TuneError` says, and the line of the user's code that it comes from."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename, file)]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else file.name
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return f"{error.full_key}: {place} reads it, and there is no such setting"
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{place}: {type(error).__name__}: {text}"


def is_own(error: Exception, file: Path) -> bool:
    """Whether the user's code raises an error itself."""
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_users(frames[-1].filename, file)


def is_limit(error: Exception) -> bool:
    """Whether an error says that numbers are needed which are not there in a rehearsal."""
    return isinstance(error, LIMITS) or any(text in str(error) for text in LIMITS_IN_WORDS)


def _is_users(name: str, file: Path) -> bool:
    """Whether a file is the recipe, or one of the user's own modules."""
    is_elsewhere = name.startswith((LIBRARY, sys.prefix, sys.base_prefix, "<")) or "site-packages" in name
    return name == str(file) or not is_elsewhere
