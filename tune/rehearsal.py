"""Whether a recipe is rehearsed: run to the end of its first optimizer step to find out what is wrong with it.

In a rehearsal no weights are read, no process is spoken to and nothing is written. What does such things asks here:
`if rehearsal.current(): ...`. `tune.validate` starts one; a recipe, or a copy of one, knows nothing of it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tune.errors import TuneError


class RehearsalEnded(Exception):
    """The rest of a recipe is not rehearsed: it needs what a rehearsal does not have."""


@dataclass
class Rehearsal:
    """What is rehearsed: `rows` of each dataset are read (None: all), on the kind of `device` that a run will have
    (None: this machine's). `report` takes what is wrong, and `note` what a run would say. Within `fake_tensors` new
    tensors have shapes alone."""

    report: Callable[[TuneError], None]
    note: Callable[[str], None]
    rows: int | None = None
    device: str | None = None
    fake_tensors: Callable[[], AbstractContextManager[None]] = nullcontext
    cut: set[str] = field(default_factory=set)  # names of the data of which not all rows were read
    folders: dict[Path, Path] = field(default_factory=dict)  # of runs: for the temporary one the one that is named

    def goes_on_after(self, error: TuneError) -> bool:
        """Report an error after which something else can stand in for what could not be made."""
        self.report(error)
        return True


_current: Rehearsal | None = None


def current() -> Rehearsal | None:
    """The rehearsal that is going on, or None: this is a run."""
    return _current


UNKNOWN = 10**9  # steps of a run, where not all rows of the data were read


def is_cut() -> bool:
    """Whether this is a rehearsal in which not all rows of the data were read."""
    return _current is not None and bool(_current.cut)


@contextmanager
def start(rehearsal: Rehearsal) -> Iterator[None]:
    global _current
    before, _current = _current, rehearsal
    try:
        yield
    finally:
        _current = before
