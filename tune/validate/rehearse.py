"""A recipe, any file, run to the end of its first optimizer step: without weights, processes or results."""

import ast
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import tune
from tune import rehearsal
from tune.distributed import current_world
from tune.errors import TuneError
from tune.validate.fake_tensors import FakeWeights
from tune.validate.statements import Missing, Statements, Unknown

LIMITS = DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException
LIMITS_IN_WORDS = ("is not supported for tensor subclasses", "FakeTensor", "WeakValueDictionary")
LIBRARY = str(Path(tune.__file__).parent)


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
    """The module of a recipe's file, its function with `@config.entrypoint`, and the YAML that this names.

    Raises:
        TuneError: it is no Python, raises an error, or has no such function.
    """

    def __init__(self, file: Path):
        self.file = file
        self.source = file.read_text(encoding="utf-8")
        self.module = sys.modules["__rehearsed__"] = types.ModuleType("__rehearsed__")
        self.module.__file__ = str(file)
        try:
            self.tree = ast.parse(self.source, str(file))
            exec(compile(self.tree, str(file), "exec"), vars(self.module))
        except SyntaxError as error:
            raise TuneError(f"{error.filename}:{error.lineno}: {error.msg}") from error
        except TuneError:
            raise
        except Exception as error:
            raise TuneError(described(error, file)) from error
        found = [each for each in vars(self.module).values() if hasattr(each, "settings_of_recipe")]
        if not found:
            raise TuneError(f"{file}: no function of it has @config.entrypoint(...)")
        self.main = found[0]


def rehearse(
    recipe: Recipe, cfg: DictConfig, *, processes: int, device: str | None, rows: int | None,
    report: Callable[[Exception], None], note: Callable[[str], None],
) -> bool:  # fmt: skip
    """Run `recipe` with the settings `cfg` as the first of so many processes, and where they are stages of a pipeline
    as the last one too. Errors go to `report`, and what a run would say to `note`. Returns whether rows of the data
    were left out."""
    cut, stages = _rehearse(recipe, cfg, processes, 0, device, rows, report, note)
    if stages > 1:
        _rehearse(recipe, cfg, processes, processes - 1, device, rows, report, note)
    return cut


def _rehearse(
    recipe: Recipe, cfg: DictConfig, processes: int, rank: int, device: str | None, rows: int | None,
    report: Callable[[Exception], None], note: Callable[[str], None],
) -> tuple[bool, int]:  # fmt: skip
    """Whether rows were left out, and how many stages there are."""
    weights = FakeWeights()

    def failed(error: Exception, needs_missing: bool) -> None:
        if isinstance(error, Unknown) or (needs_missing and not isinstance(error, TuneError)):
            return
        if repr(Missing()) not in str(error):
            report(error)

    rehearsed = rehearsal.Rehearsal(
        lambda error: failed(error, False), note, rows, device, fake_tensors=weights.made
    )
    with _process_group(processes, rank), Uninitialised(), closing(weights), rehearsal.start(rehearsed):
        # What a user's own lines save would replace what is there by tensors without values.
        with torch.compiler.set_stance("force_eager"), torch.enable_grad(), mock.patch("torch.save"):
            function = inspect.unwrap(recipe.main)
            body = next(
                each for each in recipe.tree.body if isinstance(each, ast.FunctionDef) and each.name == function.__name__
            )
            namespace = vars(recipe.module) | {body.args.args[0].arg: cfg.copy()}
            Statements(str(recipe.file), namespace, failed).run(body)
        world = current_world()
    return bool(rehearsed.cut), world.num_stages


@contextmanager
def _process_group(processes: int, rank: int) -> Iterator[None]:
    """That of so many processes, of which only one is there."""
    if is_new := not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        yield
    finally:
        if is_new:
            dist.destroy_process_group()


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
