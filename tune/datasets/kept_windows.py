"""Keep the tokenized rows of the windows of a stream from which a run starts, so that it tokenizes them once.

A window is used again if its rows, which are read and compared, are still the same. Only a few windows of a stream are
kept. If they are missing, a start takes longer.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tune.datasets.block import Places, RowBlock
from tune.datasets.kept_files import keep, kept
from tune.datasets.rows import digest_of_row
from tune.datasets.samples import Samples
from tune.errors import TuneError

MOST = 4  # windows that are kept of a stream, besides the first


@dataclass(frozen=True)
class RowNames:
    """The places of the rows of a chunk."""

    places: list[str]

    def of(self, number: int) -> str:
        return self.places[number]


class StreamChunk(NamedTuple):
    """The block of 64 rows, that of the rows that were rendered again, and the names of the rows."""

    block: RowBlock
    rendered: RowBlock | None
    places: Places

    @classmethod
    def of(cls, samples: Samples) -> "StreamChunk":
        """The chunk of which `Fit` has made samples."""
        _, block, *rendered = samples.blocks
        return cls(block, rendered[0] if rendered else None, samples.places[0])


@dataclass(frozen=True)
class KeptWindows:
    """The windows of a stream in a folder: a file for each, named by the stream's `key` and the row where it begins."""

    folder: Path
    key: str

    def open(self, row: int) -> list[StreamChunk]:
        """The chunks of the window at a row, mapped from its file; none if it is missing or damaged."""
        found = None
        with suppress(OSError):
            found = kept(self._file(row))
        if found is None:
            return []
        arrays, abouts = found
        by_chunk: list[dict[str, np.ndarray]] = [{} for _ in abouts]
        for name, values in arrays.items():
            at, _, name_in_chunk = name.partition(" ")
            by_chunk[int(at)][name_in_chunk] = values
        return [_chunk(*chunk) for chunk in zip(by_chunk, abouts, strict=True)]

    def keep(self, row: int, window: Sequence[Samples]) -> None:
        """Write the chunks of the window at a row, unless its file has them, and remove the oldest files.

        One process of a machine writes. If it cannot, it prints why: training needs no file.
        """
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        file, chunks = self._file(row), [StreamChunk.of(samples) for samples in window]
        try:
            if np.array_equal(_contents(self.open(row)), _contents(chunks)):
                os.utime(file)
            else:
                arrays, abouts = dict[str, np.ndarray](), []
                for at, chunk in enumerate(chunks):
                    of_chunk, about = _as_arrays(chunk)
                    arrays |= {f"{at} {name}": values for name, values in of_chunk.items()}
                    abouts.append(about)
                keep(file, arrays, abouts)
            others = sorted(self.folder.glob(f"{self.key}-[1-9]*"), key=lambda other: other.stat().st_mtime)
            for old in others[:-MOST]:
                old.unlink(missing_ok=True)
        except OSError as error:
            problem = f"{error.filename or file}: {error.strerror}"
            print(f"warning: {problem}. A resume will tokenize these rows again", file=sys.stderr, flush=True)

    def _file(self, row: int) -> Path:
        return self.folder / f"{self.key}-{row}"


def are_of(chunks: Sequence[StreamChunk], rows: Sequence[tuple[str, Any]]) -> bool:
    """Whether the chunks were made of these rows with their places."""
    if [place for place, _ in rows] != [place for chunk in chunks for place in _places(chunk)]:
        return False
    with suppress(TuneError):  # of a row that cannot be compared
        digests = [digest_of_row(row) if isinstance(row, dict) else 0 for _, row in rows]
        return np.array_equal(np.array(digests, np.uint64), _contents(chunks))
    return False


def _contents(chunks: Sequence[StreamChunk]) -> np.ndarray:
    """The digests of all rows."""
    return np.concatenate([np.empty(0, np.uint64), *(chunk.block.contents for chunk in chunks)])


def _places(chunk: StreamChunk) -> list[str]:
    return [chunk.places.of(number) for number in range(chunk.block.rows)]


def _as_arrays(chunk: StreamChunk) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A chunk as arrays by name, and the rest as JSON; `_chunk` is the way back."""
    arrays, about = chunk.block.as_arrays()
    rest = {"places": _places(chunk), "block": about}
    if chunk.rendered is not None:
        of_rendered, rest["rendered"] = chunk.rendered.as_arrays()
        arrays |= {f"rendered {name}": values for name, values in of_rendered.items()}
    return arrays, rest


def _chunk(arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> StreamChunk:
    of_rendered = {name: arrays.pop(name) for name in [*arrays] if name.startswith("rendered ")}
    rendered = None
    if "rendered" in rest:
        named = {name.removeprefix("rendered "): values for name, values in of_rendered.items()}
        rendered = RowBlock.from_arrays(named, rest["rendered"])
    return StreamChunk(RowBlock.from_arrays(arrays, rest["block"]), rendered, RowNames(rest["places"]))
