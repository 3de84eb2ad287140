"""Run a recipe file to the end of its first optimizer step, without weights, other processes or results."""

import functools
import io
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune import rehearsal
from tune.distributed import current_world
from tune.errors import TuneError
from tune.rehearsal import MODULE, MadeUp, StepsEnded
from tune.validate.fake_tensors import FakeWeights, ReadNumbers
from tune.validate.hooks import Missing
from tune.validate.made_up import LIBRARY, NotRehearsed, is_users, may_be_made_up
from tune.validate.recipe import Recipe
from tune.validate.stand_ins import STAND_INS

# Errors because a rehearsal lacks numbers are not the user's.
LIMITS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
LIMITS_IN_WORDS = (
    ".numpy() is not supported for tensor subclasses",
    "Trying to resize storage that is not resizable",  # .numpy() of unknown memory
    "'WeakValueDictionary.__init__",  # of pickle
)
MADE_UP = "depends on a number that a rehearsal makes up"


class Uninitialized(TorchFunctionMode):
    """Skips the initialization of parameters on the meta device, for which torch would import its compiler: that takes
    as long as all checks."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        is_init = getattr(function, "__module__", "") == "torch.nn.init"
        if is_init and (tensor := args[0] if args else given["tensor"]).is_meta:
            return tensor
        return function(*args, **given)


def rehearse(
    recipe: Recipe, cfg: DictConfig, *, processes: int, rows: int | None, report: Callable[[Exception], None],
    note: Callable[[str], None],
) -> bool:  # fmt: skip
    """Run `recipe` with the settings `cfg` as the first of `processes` processes, and with pipeline stages also as the
    last one.

    Errors go to `report`, and messages of the run to `note`. Returns whether rows of the data were skipped.
    """

    def run(rank: int) -> tuple[bool, int]:
        weights, saved = FakeWeights(), NotSaved()
        errors = Errors(weights, saved, report)
        with process_group(rank) as start, Uninitialized(), ReadNumbers(weights), closing(weights):
            start(processes)
            report_error = functools.partial(errors, reads_missing=False)
            begun = rehearsal.Rehearsal(report_error, note, rows, weights.made, start, STAND_INS)
            with rehearsed(begun, recipe.file, saved):
                recipe.call(cfg, errors)
            return bool(begun.cut), current_world().num_stages

    is_cut, stages = run(0)
    if stages > 1:
        run(processes - 1)
    return is_cut


class Errors:
    """Reports the errors of a rehearsal that do not follow from others. `NotRehearsed` wraps those that may be its own.

    `weights` has the numbers that were asked for, and `saved` the files that were not written.
    """

    def __init__(self, weights: FakeWeights, saved: "NotSaved", report: Callable[[Exception], None]):
        self.weights, self.saved, self.report = weights, saved, report
        self.has_reported = False

    def __call__(self, error: BaseException, reads_missing: bool) -> None:
        """`reads_missing`: a statement on the error's way reads the missing result of a failed one."""
        if isinstance(error, MadeUp) or may_be_made_up(error, self.weights.asked):
            error = NotRehearsed(error, MADE_UP)
        elif isinstance(error, FileNotFoundError | EOFError) and self.saved.is_missing(error):
            error = NotRehearsed(error, "a rehearsal saves no tensors, and no files in the run folder")
        if isinstance(error, Exception) and not follows(error, reads_missing, self.has_reported):
            self.has_reported = True
            self.report(error)


def follows(error: Exception, reads_missing: bool, is_later: bool) -> bool:
    """Return whether an error follows from another one, which is reported.

    `reads_missing`: a statement on its way reads the missing result of a failed one. `is_later`: errors were reported
    before this one.
    """
    if isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError | StepsEnded):
        return True
    if reads_missing and not isinstance(error, TuneError):
        return True
    # After another error, a dict may lack the keys that later lines read.
    is_key = isinstance(error, KeyError) and any(isinstance(key, str) for key in error.args)
    return (is_key and is_later) or repr(Missing()) in str(error)


@contextmanager
def rehearsed(begun: rehearsal.Rehearsal, file: Path, saved: "NotSaved") -> Iterator[None]:
    """Rehearse the recipe in `file` in this context.

    Nothing is saved or compiled: saving would replace files by tensors without values. `saved` notes the files.
    """
    saved.folders, saved.exported = begun.folders, begun.exported
    not_compiled = torch.compiler.set_stance("force_eager")
    not_logged = mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)  # tracebacks
    not_saved = saved.replaced(torch, safetensors.torch, sys.modules[MODULE])
    # Numbers of fake tensors can be made up without gradients, but not in inference mode.
    no_inference = mock.patch.object(torch._C, "_InferenceMode", lambda mode: torch.set_grad_enabled(not mode))
    with (
        _told(begun.note, file),
        rehearsal.start(begun),
        not_saved,
        not_compiled,
        not_logged,
        no_inference,
        torch.enable_grad(),
    ):
        yield


class NotSaved:
    """What a recipe would have saved. `folders` are the temporary folders of runs, `exported` those of exports."""

    def __init__(self) -> None:
        self.folders: Collection[Path] = ()
        self.exported: Collection[Path] = ()
        self.targets = list[Any]()

    @contextmanager
    def replaced(self, *modules: Any) -> Iterator[None]:
        """Let functions that save tensors only check what they get, also in modules that import them by name."""
        saving = [
            (torch.save, self._save),
            (safetensors.torch.save_file, self._save_tensors),
            (safetensors.torch.save_model, self._save_tensors),
        ]
        with ExitStack() as stack:
            for module in modules:
                for name, value in [*vars(module).items()]:
                    for function, stand_in in saving:
                        if value is function:
                            stack.enter_context(mock.patch.object(module, name, stand_in))
            yield

    def _save(self, value: Any, target: Any, *_: Any, **__: Any) -> None:
        Pickled(io.BytesIO()).dump(value)
        self._note(target)

    def _save_tensors(self, tensors: Any, target: Any, *_: Any, **__: Any) -> None:
        values = tensors.items() if isinstance(tensors, Mapping) else ()
        for name, value in values:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"save_file takes tensors, but {name} is of type {type(value).__name__}")
        self._note(target)

    def _note(self, target: Any) -> None:
        if isinstance(target, str | os.PathLike):
            folder = Path(target).parent
            if not folder.is_dir() and folder not in self.exported:
                raise RuntimeError(f"there is no folder {folder}")
        self.targets.append(target)

    def is_missing(self, error: FileNotFoundError | EOFError) -> bool:
        """Return whether an error comes from reading what was not saved, or a file of the run folder."""
        if isinstance(error, EOFError):
            return bool(self.targets)
        if error.filename is None:  # safetensors has the file only in its text
            return any(str(target) in str(error) for target in self.targets)
        file = Path(os.fsdecode(error.filename))
        folders = [folder for folder in self.folders if folder.exists()]  # a run creates it at its first step
        return any(file.is_relative_to(folder) for folder in folders) or str(file) in map(str, self.targets)


class Pickled(pickle.Pickler):
    """Pickles a value without the tensors in it, as a check that it can be pickled."""

    def persistent_id(self, value: Any) -> str | None:
        return "tensor" if isinstance(value, torch.Tensor | torch.storage.TypedStorage) else None


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
        if each.filename.startswith(LIBRARY) or each.filename == str(file) or is_users(each.filename):
            note(f"warning: {each.message}")


def is_limit(error: Exception) -> bool:
    """Return whether an error means that a rehearsal lacks numbers."""
    return isinstance(error, LIMITS) or any(text in str(error) for text in LIMITS_IN_WORDS)
