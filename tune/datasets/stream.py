"""Datasets larger than the disk: tokenized, shuffled and packed while they are read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from tune.collators import Pixels, Sample
from tune.datasets.accounting import Accounting
from tune.datasets.dataset import Dataset, permuted, renumbered
from tune.datasets.fit import Fit
from tune.datasets.kept_windows import KeptWindows, RowNames, StreamChunk, are_of
from tune.datasets.preparation import TRUSTED, read_as, require_few_bad_rows
from tune.datasets.ray_data import map_by_ray
from tune.datasets.read.opening import Source
from tune.datasets.rows import RowReader
from tune.datasets.samples import Samples
from tune.datasets.workers import CHUNK, ahead, map_chunks
from tune.errors import TuneError


@dataclass(frozen=True)
class Position:
    """The position in a stream: `drawn` training rows of the window that begins at row `row` of the source."""

    epoch: int = 0
    row: int = 0
    samples: int = 0  # in earlier windows of the epoch
    drawn: int = 0
    fingerprint: str | None = None  # of the window, once a row is drawn from it
    parts: Mapping[str, "Position"] = field(default_factory=dict)  # of the sources of a mixture

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Position":
        """Build from the result of `asdict`. Checkpoints of earlier versions have no parts."""
        parts = {name: cls.from_dict(part) for name, part in values.get("parts", {}).items()}
        return cls(**{**values, "parts": parts})


@dataclass(frozen=True)
class Chunks:
    """Tokenizes the rows of a source while it is read."""

    source: Source
    reader: RowReader
    fit: Fit
    max_bad_share: float
    ignored_columns: Sequence[str]
    workers: int | None
    windows: KeptWindows

    def after(self, start: int, by_ray: bool = False) -> Iterator[Samples]:
        """Yield what is trained on of the chunks after the first `start` rows, those of a window that is kept first.

        Raises TuneError if too many rows are unusable: at the end, or as soon as the limit is exceeded after 1,000
        rows; if none may be unusable, at the first.
        """

        rows = self.source.after(start)
        stored = self.windows.open(start)
        given = [*islice(rows, sum(chunk.block.rows for chunk in stored))]
        if not are_of(stored, given):
            stored, rows, given = [], chain(given, rows), []
        kept = map(self._fitted, stored)
        if by_ray:
            made = map_by_ray(self.chunk, partial(self.source.after, start + len(given)), self.workers)
        else:
            made = map_chunks(self.chunk, rows, self.workers)
        counted = Accounting()
        for samples in chain(kept, made):
            counted += samples.accounting
            if counted.rows >= TRUSTED or not self.max_bad_share:
                require_few_bad_rows(counted, self.max_bad_share, self.source.name, "the first ")
            yield samples
        require_few_bad_rows(counted, self.max_bad_share, self.source.name)

    def chunk(self, rows: Sequence[tuple[str, Any]]) -> Samples:
        """What is trained on of 64 rows with their places."""
        names = RowNames([place for place, _ in rows])
        block, rendered = self.reader.blocks([*enumerate(row for _, row in rows)], names, self.fit)
        return self._fitted(StreamChunk(block, rendered, names))

    def _fitted(self, chunk: StreamChunk) -> Samples:
        return read_as(self.fit(*chunk), self.reader, self.ignored_columns)


@dataclass(frozen=True)
class Window:
    """The position where a window begins, and its rows, which are shuffled and packed together."""

    start: Position
    data: Dataset
    chunks: Sequence[Samples]


@dataclass(frozen=True)
class DrawnRows:
    """Training rows drawn from a stream."""

    documents: list[list[Sample]]
    columns: dict[str, np.ndarray]
    row_tokens: np.ndarray
    row_supervised: np.ndarray
    row_weights: np.ndarray
    row_pairs: np.ndarray
    pictures: Pixels | None = field(default=None, kw_only=True)

    def row(self, index: int) -> list[Sample]:
        return self.documents[index]


class Stream:
    """A source that is read again and again from beginning to end, one window of rows at a time.

    The rows of a window are shuffled and packed among themselves. Their order is a function of (seed, epoch, window)
    alone. Every process reads all rows. `accounting` counts the first window. The first window, and those that `keep`
    is asked for, are kept: the next start does not tokenize them.
    """

    validation: Any = None  # a `Dataset`, or a `Mixture` of those of a mixture's streams

    def __init__(
        self, chunks: Callable[[int], Iterator[Samples]], name: str, max_seq_len: int, pack_to: int | None, window: int,
        fingerprint: str, kept: KeptWindows | None = None, pictures: Pixels | None = None,
    ) -> None:  # fmt: skip
        """`chunks(n)` yields the rows after the first n of the source, in chunks of 64 rows. `window` is a number of
        rows, rounded up to whole chunks. `kept` has the windows that `chunks` reads instead of tokenizing them; None:
        nothing is kept. Raises TuneError for mistakes in the first window."""
        self.chunks, self.name, self.fingerprint, self.pixels = chunks, name, fingerprint, pictures
        self.max_seq_len, self.pack_to = max_seq_len, pack_to
        self.chunks_of_window = -(-window // CHUNK)
        self._seen = Accounting(row_capacity=pack_to).with_source(f"{name}, rows read in this run")
        self.vocab_size: int | None = None
        self.kept = kept
        self._windows = self._passes(Position())
        self._first: Window | None = next(self._windows)
        self._drawn = {0: self._first.chunks}  # of the windows that a position may be in, by their first row
        self.accounting = self._first.data.accounting
        self.keep(Position())

    def require_vocabulary(self, size: int) -> None:
        """Raise TuneError if a token id is not below a model's vocabulary `size`, also when a later window is read."""
        self.vocab_size = size
        if self._first:
            self._first.data.require_vocabulary(size)

    @property
    def seen(self) -> Accounting:
        """The counts of all rows read so far."""
        return self._seen

    @property
    def pictures(self) -> Pixels | None:
        """Makes pixels of pictures; None if the first window has none, as long as nothing has been drawn."""
        return next((part.pictures for part in self.parts.values() if part.pictures), None)

    @property
    def parts(self) -> dict[str, Dataset]:
        """The first window, as long as nothing has been drawn."""
        assert self._first
        return {"": self._first.data}

    def keep(self, position: Position) -> None:
        """Keep the window of a position, of those drawn from last: a resume there does not tokenize it."""
        if self.kept and position.row in self._drawn:
            self.kept.keep(position.row, self._drawn[position.row])

    def draw(self, seed: int, number: int, start: Position) -> Iterator[tuple[DrawnRows, Position]]:
        """Yield `number` training rows at a time, with the position after them, without end."""
        windows = self._passes(start)
        if start == Position() and self._first:  # already read
            windows, self._first = chain([self._first], self._windows), None
        rows = list[tuple[list[Sample], *tuple[np.number, ...]]]()
        for window in ahead(windows):
            drawn, first, data = 0, window.start, window.data
            # Rows are drawn before the ones before them are used: a position may be in the window before.
            self._drawn = dict([*self._drawn.items()][-1:]) | {first.row: window.chunks}
            self._seen += data.accounting
            if (first.epoch, first.row) == (start.epoch, start.row) and start.fingerprint:
                drawn = start.drawn
                if data.fingerprint != start.fingerprint:
                    raise TuneError(
                        f"{self.name}: the checkpoint was made with other data: rows after row {start.row:,} have "
                        "changed. Restore them, or start over with resume=never and another output_dir"
                    )
            order = permuted(len(data), seed, first.epoch, first.row)
            for at, index in enumerate(order[drawn:].tolist(), drawn + 1):
                documents = [renumbered(document, first.samples) for document in data.row(index)]
                counts = (data.row_tokens, data.row_supervised, data.row_weights, data.row_pairs)
                rows.append((documents, *(count[index] for count in counts)))
                if len(rows) == number:
                    documents_of, *of_rows = zip(*rows, strict=True)
                    position = replace(first, drawn=at, fingerprint=data.fingerprint)
                    counts_of = map(np.array, of_rows)
                    has_pictures = any(sample.pictures for documents in documents_of for sample in documents)
                    pixels = self.pixels if has_pictures else None
                    yield DrawnRows(list(documents_of), data.columns, *counts_of, pictures=pixels), position
                    rows = []

    def windows(self, start: Position | None = None) -> Iterator[Window]:
        """Yield the windows from the one at `start` to the end of the source."""
        start = start or Position()
        row, samples = start.row, start.samples
        chunks = self.chunks(row)
        while (window := self._next_chunks(chunks)) or not row:
            if row and not any(map(len, window)):
                return  # the end of the source, without a usable row
            rows = f", streamed: rows {row + 1:,} to {row + CHUNK * len(window):,}" if window else ""
            data = Dataset(Samples.joined(window, f"{self.name}{rows}"), self.pack_to, self.pixels)
            if self.vocab_size:
                data.require_vocabulary(self.vocab_size)
            yield Window(Position(start.epoch, row, samples), data, window)
            row, samples = row + CHUNK * len(window), samples + data.accounting.samples

    def _passes(self, start: Position) -> Iterator[Window]:
        """Yield windows without end, pass after pass."""
        while True:
            yield from self.windows(start)
            start = Position(start.epoch + 1)

    def _next_chunks(self, chunks: Iterator[Samples]) -> list[Samples]:
        """Read the chunks of a window; read on if none of its rows is usable."""
        window: list[Samples] = []
        while more := list(islice(chunks, self.chunks_of_window)):
            window += more
            if any(map(len, more)):
                break
        return window
