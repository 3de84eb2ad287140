"""Whether a recipe is rehearsed: run to the end of its first optimizer step, to find out what is wrong with it.

In a rehearsal no weights are read, other processes are not there, and nothing is written. Code that does such things
asks here: `if rehearsal.current(): ...`. `tune.validate` starts one; a recipe, or a copy of one, knows nothing of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tune.errors import TuneError

T = TypeVar("T")


class RehearsalEnded(Exception):
    """The rest of a recipe is not rehearsed: it needs what a rehearsal does not have."""


class Planning(Protocol):
    """Notes a rehearsal for a plan of memory and time. Neither data nor weights nor a tokenizer need be there: rows and
    completions are as long as they may be. It is that of one process, and of shortened models."""

    device_type: str  # that of the planned device

    def take_axes(self, axes: Mapping[str, Any]) -> bool:
        """Note how the recipe asks for its processes to be laid out. Returns whether one process stands for all."""

    def take_model(self, model: Any, how: Mapping[str, Any]) -> None:
        """Note a model that the recipe shards, and `how` (the arguments of `parallelize`). It is shortened in place."""

    def take_rows(self, rows: int, micro_batch_size: int, max_steps: int | None = None) -> int:
        """Note the rows of a step and of a micro-batch; returns how many rows a micro-batch shall have."""

    def take_sampling(self, sampler: Any, model: Any, prompts: list[Any]) -> None:
        """Note what is sampled from `model`: a completion for each of `prompts`, which may be equal."""

    def scoring(self) -> AbstractContextManager[bool]:
        """A context in which models score what was sampled, if it says so."""


@dataclass
class Rehearsal:
    """How a recipe is rehearsed. Of each dataset the first `rows` are read (None: all). `report` takes an error after
    which the rehearsal goes on, and `note` what a run would say. Within `fake_tensors` new tensors have shapes alone.
    `start_processes` makes a process group of so many, of which only one is there."""

    report: Callable[[TuneError], None]
    note: Callable[[str], None]
    rows: int | None
    fake_tensors: Callable[[], AbstractContextManager[None]]
    start_processes: Callable[[int], None]
    stand_ins: Mapping[type[Any], type[Any]]  # classes that take the place of others
    cut: set[str] = field(default_factory=set)  # names of the data of which not all rows were read
    folders: dict[Path, Path] = field(default_factory=dict)  # for the temporary folder of a run the one that is named
    planning: Planning | None = None  # what notes it for a plan


_current: Rehearsal | None = None


def current() -> Rehearsal | None:
    """The rehearsal that is going on, or None: this is a run."""
    return _current


def planning() -> Planning | None:
    """What notes the rehearsal that is going on for a plan, or None."""
    return _current.planning if _current else None


UNKNOWN = 10**9  # steps of a run, where not all rows of the data were read


def is_cut() -> bool:
    """Whether this is a rehearsal in which not all rows of the data were read."""
    return _current is not None and bool(_current.cut)


def stand_in(kind: type[T]) -> type[T]:
    """The class that takes the place of `kind`, or of a subclass, in a rehearsal; `kind` itself in a run."""
    for original, other in (_current.stand_ins if _current else {}).items():
        if kind is original:
            return other
        if issubclass(kind, original):
            return type(kind.__name__, (kind, other), {})
    return kind


def named(folder: Path) -> Path:
    """The run folder that a user has named, which in a rehearsal a temporary one stands for."""
    return _current.folders.get(folder, folder) if _current else folder


@contextmanager
def start(rehearsal: Rehearsal) -> Iterator[None]:
    global _current
    before, _current = _current, rehearsal
    try:
        yield
    finally:
        _current = before
