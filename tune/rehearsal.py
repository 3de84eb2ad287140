"""Rehearse a recipe: run it to the end of its first optimizer step, to find mistakes.

A rehearsal reads no weights, has no other processes, and writes nothing. Code that does these things asks
`if rehearsal.current(): ...`. `tune.validate` starts a rehearsal; recipes and their copies know nothing of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tune.errors import TuneError

T = TypeVar("T")


MODULE = "__rehearsed__"  # the name of the recipe's module in a rehearsal


class RehearsalEnded(BaseException):
    """Ends a rehearsal early, where the rest of the recipe needs something that a rehearsal does not have.

    No `except Exception` of a recipe catches it.
    """


class MainCalled(BaseException):
    """Ends the reading of a recipe's file that calls its main function without `if __name__ == "__main__":`."""


class MadeUp(BaseException):
    """Ends a loop that asks again and again for a number that a rehearsal makes up."""


class StepsEnded(StopIteration):
    """The end of the steps of a rehearsal, of which a run has more."""


class Planning(Protocol):
    """Records a rehearsal for a plan of memory and time.

    Data, weights and tokenizer are not needed: rows and completions have their maximum length. The rehearsal is of one
    process, with shortened models.
    """

    device_type: str  # of the planned device

    def take_axes(self, axes: Mapping[str, Any]) -> bool:
        """Record the layout of processes that the recipe asks for. Returns whether one process stands for all."""

    def take_model(self, model: Any, how: Mapping[str, Any]) -> None:
        """Record a model that the recipe shards, and `how` (arguments of `parallelize`). Shortens it in place."""

    def take_rows(self, rows: int, micro_batch_size: int, max_steps: int | None = None) -> int:
        """Record the rows of a step and of a micro-batch; returns the rows of a micro-batch to rehearse."""

    def take_sampling(self, sampler: Any, model: Any, prompts: list[Any]) -> None:
        """Record sampling from `model`: a completion for each of `prompts`, which may contain duplicates."""

    def scoring(self) -> AbstractContextManager[bool]:
        """A context in which models score the samples; it yields whether they do."""


@dataclass
class Rehearsal:
    """The settings of a rehearsal.

    - `report` receives an error after which the rehearsal continues, `note` the notes that a run would print.
    - `rows`: read this many rows of each dataset (None: all).
    - Within `fake_tensors`, new tensors have shapes but no data.
    - `start_processes(n)` makes a process group of n processes, of which only this one exists.
    """

    report: Callable[[TuneError], None]
    note: Callable[[str], None]
    rows: int | None
    fake_tensors: Callable[[], AbstractContextManager[None]]
    start_processes: Callable[[int], None]
    stand_ins: Mapping[type[Any], type[Any]]  # class -> its replacement
    cut: set[str] = field(default_factory=set)  # names of the datasets that were not read to the end
    folders: dict[Path, Path] = field(default_factory=dict)  # temporary folder of a run -> the folder that was named
    exported: set[Path] = field(default_factory=set)  # folders that exports would have created
    planning: Planning | None = None  # records it for a plan


_current: Rehearsal | None = None


def current() -> Rehearsal | None:
    """The current rehearsal; None in a run."""
    return _current


def planning() -> Planning | None:
    """The object that records the current rehearsal for a plan, or None."""
    return _current.planning if _current else None


UNKNOWN = 10**9  # steps of a run whose data was not read to the end


def is_of_shapes() -> bool:
    """Whether only shapes count, so that one operation may stand for many. A plan counts the operations too."""
    return _current is not None and _current.planning is None


def is_cut() -> bool:
    """Whether this is a rehearsal that has not read all rows of its data."""
    return _current is not None and bool(_current.cut)


@contextmanager
def all_rows() -> Iterator[None]:
    """Read data in full within the block, also in a rehearsal."""
    if _current is None:
        yield
        return
    rows, _current.rows = _current.rows, None
    try:
        yield
    finally:
        _current.rows = rows


def stand_in(kind: type[T]) -> type[T]:
    """The class that replaces `kind`, or a subclass of a replaced class, in a rehearsal; `kind` itself in a run."""
    for original, other in (_current.stand_ins if _current else {}).items():
        if kind is original:
            return other
        if issubclass(kind, original):
            return type(kind.__name__, (kind, other), {})
    return kind


def named(folder: Path) -> Path:
    """The run folder that the user named; in a rehearsal, `folder` is a temporary one."""
    return _current.folders.get(folder, folder) if _current else folder


@contextmanager
def start(rehearsal: Rehearsal) -> Iterator[None]:
    """Make `rehearsal` the current one within the block."""
    global _current
    before, _current = _current, rehearsal
    try:
        yield
    finally:
        _current = before
