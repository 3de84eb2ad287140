"""Open a source of rows: files, the Hugging Face hub, or a function."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tune import rehearsal
from tune.datasets.read.data_files import File, choose_files, is_on_the_hub, place_at, require_train
from tune.datasets.read.readers import PlacedRows, numbered, rows_of
from tune.datasets.user_functions import load_function
from tune.errors import TuneError, explained

FUNCTION = "python:"


@dataclass(frozen=True)
class Source:
    """Rows, each with its place ("chats.jsonl:12") for messages. Each iteration reads them again.

    `take` limits the number of rows; `files` is empty if the rows do not come from files.
    """

    name: str
    rows: Callable[[], PlacedRows]
    take: int | None = None
    files: list[File] = field(default_factory=list)
    ignored_files: list[str] = field(default_factory=list)

    def __iter__(self) -> PlacedRows:
        return islice(self.rows(), self.take)

    def rehearsed(self) -> "Source":
        """In a rehearsal, the source cut to the first rows; the rehearsal notes whether there are more."""
        rehearsed = rehearsal.current()
        if rehearsed is None or rehearsed.rows is None or (self.take or 1 << 62) <= rehearsed.rows:
            return self
        if next(islice(self.rows(), rehearsed.rows, None), None) is not None:
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
        return Source(path, lambda: _by_datasets("load_dataset", otherwise, path, subset, split=split), take)
    if subset is not None:
        raise TuneError(f"{path} is not a hub dataset, and only these have subsets. Remove subset={subset}")
    if is_function:
        require_train(path, split)
        function = load_function(path.removeprefix(FUNCTION), path)
        return Source(path, lambda: _generated(function, path), take)
    place = place_at(path)
    if (saved := place.saved_split(split)) is not None:
        otherwise = "cannot be read as a saved dataset"
        return Source(path, lambda: _by_datasets("load_from_disk", otherwise, saved), take, place_at(saved).below())
    files, ignored = choose_files(place, split)
    return Source(path, lambda: (row for file in files for row in rows_of(file)), take, files, ignored)


def _generated(function: Callable[[], Any], path: str) -> PlacedRows:
    name, number = getattr(function, "__name__", "function"), 0
    try:
        for number, row in enumerate(function(), 1):
            yield f"{name}:row {number}", row
    except TuneError:
        raise
    except Exception as error:  # a user's function can raise anything
        raise TuneError(f"{path} fails after row {number}: {type(error).__name__}: {error}") from error


def _by_datasets(function: str, otherwise: str, name: str, *arguments: Any, **options: Any) -> PlacedRows:
    """Yield rows of a dataset that a function of Hugging Face's `datasets` opens: from the hub or `save_to_disk`."""
    import datasets

    datasets.disable_progress_bars()
    with explained(f"{name} {otherwise}", OSError, ValueError, datasets.exceptions.DatasetsError):
        rows = getattr(datasets, function)(name, *arguments, **options)
    yield from numbered(name, rows.with_format("arrow").iter(batch_size=1024))
