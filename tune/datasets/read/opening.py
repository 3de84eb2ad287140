"""Open a source of rows: files, the Hugging Face hub, or a function."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from tune import rehearsal
from tune.datasets.read.data_files import File, choose_files, is_on_the_hub, place_at, require_train
from tune.datasets.read.pieces import RowPlaces, mark_of
from tune.datasets.read.readers import NumberedRows, Skip, numbered, rows_of
from tune.datasets.user_functions import load_function
from tune.errors import TuneError, explained

FUNCTION = "python:"
PlacedRows = Iterator[tuple[str, Any]]
"""Rows, each with its place. A TuneError takes the place of a malformed row."""


@dataclass(frozen=True)
class Source:
    """Rows, each with its place ("chats.jsonl:12") for messages. Each iteration reads them again.

    `take` limits the number of rows. They come from `files`, or from the function `rows(start=0)`, which yields those
    after the first `start` with their numbers, named by `places`. `version` is equal for equal rows, if that is known
    without reading them.
    """

    name: str
    take: int | None = None
    files: list[File] = field(default_factory=list)
    ignored_files: list[str] = field(default_factory=list)
    rows: Callable[..., NumberedRows] | None = None
    places: RowPlaces = field(default_factory=lambda: RowPlaces(""))
    version: Callable[[], str | None] = lambda: None

    def __iter__(self) -> PlacedRows:
        return self.after(0)

    def after(self, start: int) -> PlacedRows:
        """Yield the rows after the first `start`, which are skipped without parsing them where the files allow it."""
        return islice(self._after(start), None if self.take is None else max(0, self.take - start))

    def _after(self, start: int) -> PlacedRows:
        if self.rows:
            yield from ((self.places.of(number), row) for number, row in self.rows(start))
        skip = Skip(start)
        for file in self.files if not self.rows else ():
            places = RowPlaces(file.name, mark_of(file))
            yield from ((places.of(number), row) for number, row in rows_of(file, skip=skip))

    def rehearsed(self) -> "Source":
        """In a rehearsal, the source cut to the first rows; the rehearsal notes whether there are more."""
        rehearsed = rehearsal.current()
        if rehearsed is None or rehearsed.rows is None or (self.take or 1 << 62) <= rehearsed.rows:
            return self
        if next(self._after(rehearsed.rows), None) is not None:
            rehearsed.cut.add(self.name)
        return replace(self, take=rehearsed.rows)


def read(path: str, split: str = "train", subset: str | None = None, take: int | None = None) -> Source:
    """Open a file, folder, glob, a URL of these, a dataset on the hub, or a generator function (`python:` + its path).

    Raises TuneError if it does not exist or does not have the split.
    """
    is_function = path.startswith(FUNCTION)
    if not is_function and is_on_the_hub(path):
        asked = f"from the Hugging Face hub (subset={subset}, split={split})"
        otherwise = f"is not a file or folder, and cannot be loaded {asked}"
        opened = partial(_opened, "load_dataset", f"{path} {otherwise}", path, subset, split=split)
        return _of_datasets(path, opened, take)
    if subset is not None:
        raise TuneError(f"{path} is not a hub dataset, and only these have subsets. Remove subset={subset}")
    if is_function:
        require_train(path, split)
        function = load_function(path.removeprefix(FUNCTION), path)
        places = RowPlaces(getattr(function, "__name__", "function"), ":row ")
        return Source(path, take, rows=partial(_generated, function, path), places=places)
    place = place_at(path)
    if (saved := place.saved_split(split)) is not None:
        opened = partial(_opened, "load_from_disk", f"{saved} cannot be read as a saved dataset", saved)
        return _of_datasets(saved, opened, take, place_at(saved).below())
    files, ignored = choose_files(place, split)
    return Source(path, take, files, ignored)


def _generated(function: Callable[[], Any], path: str, start: int = 0) -> NumberedRows:
    number = 0
    try:
        for number, row in enumerate(function(), 1):
            if number > start:
                yield number, row
    except TuneError:
        raise
    except Exception as error:  # a user's function can raise anything
        raise TuneError(f"{path} fails after row {number}: {type(error).__name__}: {error}") from error


def _of_datasets(name: str, opened: Callable[[], Any], take: int | None, files: Sequence[File] = ()) -> Source:
    """The rows of a dataset of Hugging Face's `datasets`, which knows when they change."""
    places = RowPlaces(name, ":row ")

    def rows(start: int = 0) -> NumberedRows:
        data = opened().with_format("arrow")
        if start:  # `skip` refuses to skip all rows
            data = data.skip(start) if start < len(data) else data.take(0)
        return numbered(data.iter(batch_size=1024), number=start)

    return Source(name, take, [*files], rows=rows, places=places, version=lambda: opened()._fingerprint)


def _opened(function: str, otherwise: str, *arguments: Any, **options: Any) -> Any:
    """A dataset that a function of Hugging Face's `datasets` opens: from the hub or `save_to_disk`."""
    import datasets

    datasets.disable_progress_bars()
    with explained(otherwise, OSError, ValueError, datasets.exceptions.DatasetsError):
        return getattr(datasets, function)(*arguments, **options)
