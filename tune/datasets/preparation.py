"""Take the rows of a source through the steps: tokenize its pieces, keep them as blocks, and fit them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from tune.datasets.accounting import NAMES_SHOWN, Accounting
from tune.datasets.block import RowBlock
from tune.datasets.fit import Fit
from tune.datasets.kept_files import content_of, hash_of, keep, kept, key_of, locked, writable
from tune.datasets.mismatched import with_mismatched
from tune.datasets.parse.columns import recognize
from tune.datasets.parse.formats import FORMATS, Format
from tune.datasets.progress import PreparationProgress
from tune.datasets.read.opening import Source
from tune.datasets.read.pieces import ROWS, RowPlaces, SourcePiece, in_turn, pieces_of
from tune.datasets.reasons import CANNOT_BE_USED
from tune.datasets.rows import RowReader, exact_text
from tune.datasets.samples import Samples, block_of_prefix
from tune.datasets.user_functions import load_function, sources_of
from tune.datasets.workers import available_cores, map_chunks
from tune.errors import TuneError, explained
from tune.secrets import without_secrets

TRUSTED = 1000  # rows after which the share of bad rows is reliable


@dataclass(frozen=True)
class Kept:
    """A piece that is prepared: its block, that of the rows that were rendered again, and how many rows are taken."""

    key: str
    rendered_key: str | None
    file: int  # its number in the source
    block: RowBlock
    rendered: RowBlock | None
    places: RowPlaces
    rows: int | None = None


@dataclass(frozen=True)
class Preparation:
    """Prepares a source for one or several ways to fit it, and keeps in `folder` what was made."""

    source: Source
    reader: RowReader
    folder: Path
    workers: int | None = None
    max_bad_share: float = 0.0
    ignored_columns: Sequence[str] = ()

    def samples(self, fit: Fit, name: str, capacity: int | None) -> Samples:
        """The samples of the source, mapped from files that are written first if they are missing.

        `capacity`: tokens of a packed row, of which labeled answers leave room for mismatched ones.

        Raises TuneError if too many rows are unusable: at the end, or as soon as the limit is exceeded after 1,000
        rows. If no row may be unusable, stops after the block with the fifth one.
        """
        name = without_secrets(name)
        with writable(self.folder, name):
            content = self._content()
            settings = [fit_settings(fit), self.source.take, capacity if fit.kind == "labelled" else None]
            file = None if content is None else self._file(content, settings)
            samples = self._from_cache(file)
            if samples is not None:
                require_few_bad_rows(samples.accounting, self.max_bad_share, name)
            else:
                lock = self.folder / f"{file.name if file else key_of(name, settings)}.lock"
                with locked(lock, name):
                    samples = self._open(file) if file else None  # another process may have prepared it meanwhile
                    samples = samples or self._made(fit, name, capacity, file, settings)
        return replace(samples, accounting=samples.accounting.with_source(name, self.source.ignored_files))

    def _made(self, fit: Fit, name: str, capacity: int | None, file: Path | None, settings: Any) -> Samples:
        """Prepare the pieces, and put together what is trained on."""
        parts, samples_of_parts = self._fitted(fit, name)
        file = file or self._file([part.key for part in parts], settings)
        if samples := self._from_cache(file):  # rows that had to be read to be known
            return samples
        samples_of_parts = [read_as(each, self.reader, self.ignored_columns) for each in samples_of_parts]
        samples = Samples.joined(samples_of_parts, name)
        if fit.kind == "labelled":
            samples = with_mismatched(samples, fit.max_seq_len, capacity)
        self._keep(file, samples, parts, fit.prefix)
        kept_samples = self._open(file)
        assert kept_samples is not None
        return kept_samples

    def _from_cache(self, file: Path | None) -> Samples | None:
        """The samples in a file that an earlier run wrote, if it did."""
        samples = self._open(file) if file else None
        if samples is None or file is None:
            return None
        return replace(samples, accounting=samples.accounting.from_cache(str(file), file.stat().st_mtime))

    def _fitted(self, fit: Fit, name: str) -> tuple[list[Kept], list[Samples]]:
        """The pieces and what is trained on of each."""
        parts, fitted, counted = [], [], Accounting()
        with PreparationProgress(name) as progress:
            for part in self._parts(fit, progress):
                parts.append(part)
                fitted.append(fit(part.block, part.rendered, part.places, part.rows))
                counted += fitted[-1].accounting
                enough = counted.rows >= TRUSTED if self.max_bad_share else len(counted.mistakes) == NAMES_SHOWN
                if enough:
                    require_few_bad_rows(counted, self.max_bad_share, name, "the first ")
        require_few_bad_rows(counted, self.max_bad_share, name)
        return parts, fitted

    def _content(self) -> list[Any] | None:
        """What the samples depend on, as far as it is known without reading rows; None: the rows must be read."""
        if self.source.files:
            # By file: the same pieces may be divided otherwise among files, which name the places of rows.
            return [[file.suffixes, *self._keys(file)] for file in self.source.files]
        version = self.source.version()
        return None if version is None else [version]

    def _keys(self, file: Any) -> Iterator[str]:
        pieces = self._pieces_of(file)
        first = next(pieces, None)
        if first is None:
            return
        yield first.key
        if first.most is None:
            yield from (piece.key for piece in pieces)

    def _pieces_of(self, file: Any) -> Iterator[SourcePiece]:
        return pieces_of(file, lambda file: content_of([file], self.folder)[0], self.folder / "files")

    def _pieces(self) -> Iterator[tuple[int, Iterator[SourcePiece]]]:
        """For each file of the source, its number and its pieces."""
        source = self.source
        if source.rows is None:
            for number, file in enumerate(source.files):
                yield number, self._pieces_of(file)
        elif source.files:  # of a saved dataset
            content = hash_of(content_of(source.files, self.folder))
            yield 0, in_turn(source.places, content, source.rows)
        elif (version := source.version()) is not None:
            yield 0, in_turn(source.places, version, source.rows)
        else:
            yield 0, _by_content(source)

    def _parts(self, fit: Fit, progress: PreparationProgress) -> Iterator[Kept]:
        """Prepare the pieces, as many as are taken."""
        left = self.source.take
        for number, pieces in self._pieces():
            peeked = next(pieces, None)
            if peeked is None:
                continue
            pieces = chain([peeked], pieces)
            if peeked.most is None and left is None:
                pieces = iter(self._prepared_side_by_side([*pieces], fit, progress))
            for piece in pieces:
                if left is not None and left < ROWS and self._block(piece.key) is None:
                    piece = replace(piece, key=f"{piece.key}, {left} rows", rows=_Firsts(piece.rows, left))
                is_new = self._block(piece.key) is None
                part = self._prepared(piece, number, fit, progress)
                rows = part.block.rows
                if is_new:
                    progress.add(rows, piece.bytes)
                if left is not None:
                    part, left = replace(part, rows=min(left, rows)), max(0, left - rows)
                yield part
                if left == 0:
                    return
                if piece.most and rows < piece.most:
                    break

    def _prepared_side_by_side(
        self, pieces: list[SourcePiece], fit: Fit, progress: PreparationProgress
    ) -> list[SourcePiece]:
        """Prepare the pieces in processes, each one whole, if there are enough of them. Returns the pieces."""
        workers = self.workers or available_cores()
        missing = [piece for piece in pieces if self._block(piece.key) is None]
        progress.expect(sum(piece.bytes for piece in missing))
        if workers > 1 and len(missing) >= 2 * workers:
            for rows, size in map_chunks(partial(self._prepare_one, fit), missing, workers, 1):
                progress.add(rows, size)
        return pieces

    def _prepare_one(self, fit: Fit, pieces: list[SourcePiece]) -> tuple[int, int]:
        """Prepare a piece in this process: its rows and bytes."""
        (piece,) = pieces
        part = replace(self, workers=1)._prepared(piece, 0, fit, None)
        return part.block.rows, piece.bytes

    def _prepared(self, piece: SourcePiece, number: int, fit: Fit, progress: PreparationProgress | None) -> Kept:
        """A piece, from the files that are kept of it, or made and kept."""
        key = self._key(piece.key)
        block, rendered_key, rendered = self._block(piece.key), None, None
        if block is None:
            block, rendered = self._tokenized(piece, fit, progress)
            block = self._kept_block(key, block)
        too_long = fit.rows_to_render(block)
        if len(too_long):
            rendered_key = key_of(key, render_settings(fit))
            found = None if rendered else self._open_block(rendered_key)
            made = rendered or (None if found else self._rendered(piece, fit, block, too_long))
            rendered = self._kept_block(rendered_key, made) if made else found
        assert isinstance(piece.places, RowPlaces)
        return Kept(key, rendered_key, number, block, rendered, piece.places)

    def _tokenized(
        self, piece: SourcePiece, fit: Fit, progress: PreparationProgress | None
    ) -> tuple[RowBlock, RowBlock | None]:
        """The block of a piece, and that of its conversations that are too long."""
        chunks = map_chunks(partial(self.reader.blocks, places=piece.places, fit=fit), piece.rows(), self.workers)
        blocks, others, counted = [RowBlock.of([])], [], Accounting()
        for block, rendered in chunks:
            blocks.append(block)
            others += [rendered] if rendered else []
            if progress:
                progress.watch(block, piece.places, self.max_bad_share)
            counted += block.accounting(piece.places)
            if self.max_bad_share and counted.rows >= TRUSTED:
                require_few_bad_rows(counted, self.max_bad_share, self.source.name, "the first ")
        return RowBlock.joined(blocks), RowBlock.joined(others) if others else None

    def _rendered(self, piece: SourcePiece, fit: Fit, block: RowBlock, rows: np.ndarray) -> RowBlock:
        """The block of conversations that are too long, which are read again."""
        wanted = {*block.numbers[rows].tolist()}
        found = (numbered for numbered in piece.rows() if numbered[0] in wanted)
        return RowBlock.joined([*map_chunks(partial(self.reader.cut, fit=fit), found, self.workers)])

    def _key(self, piece: str) -> str:
        return key_of(piece, self.reader.tokenizer.fingerprint, reader_settings(self.reader))

    def _block(self, piece: str) -> RowBlock | None:
        return self._open_block(self._key(piece))

    def _kept_block(self, key: str, block: RowBlock) -> RowBlock:
        """The block, mapped from the file in which it is kept from now on, so that it takes no memory."""
        keep(self.folder / "blocks" / key, *block.as_arrays())
        found = self._open_block(key)
        assert found is not None
        return found

    def _open_block(self, key: str) -> RowBlock | None:
        found = kept(self.folder / "blocks" / key)
        return RowBlock.from_arrays(*found) if found else None

    def _file(self, content: Sequence[Any], settings: Any) -> Path:
        key = key_of(content, self.reader.tokenizer.fingerprint, reader_settings(self.reader), settings)
        return self.folder / "datasets" / key

    def _keep(self, file: Path, samples: Samples, parts: Sequence[Kept], prefix: Sequence[int]) -> None:
        arrays, rest = samples.as_arrays()
        about = [[part.key, part.rendered_key, part.file, vars(part.places)] for part in parts]
        keep(file, arrays, {**rest, "parts": about, "prefix": [*prefix]})

    def _open(self, file: Path) -> Samples | None:
        """The samples in a file; None if it, or a block of it, is missing or damaged."""
        found = kept(file)
        if found is None:
            return None
        arrays, rest = found
        names = [each.name for each in self.source.files] if self.source.rows is None else [self.source.places.name]
        blocks, places = [block_of_prefix(rest.pop("prefix"))], []
        for key, rendered_key, number, place in rest.pop("parts"):
            for block_key in filter(None, (key, rendered_key)):
                block = self._open_block(block_key)
                if block is None:
                    return None
                blocks.append(block)
            places.append(RowPlaces(**{**place, "name": names[number]}))
        return Samples.from_arrays(arrays, rest, blocks, places)


@dataclass(frozen=True)
class _Firsts:
    """The first rows of others."""

    rows: Callable[[], Iterator[tuple[int, Any]]]
    count: int

    def __call__(self) -> Iterator[tuple[int, Any]]:
        return islice(self.rows(), self.count)


@dataclass(frozen=True)
class _Given:
    """Rows in memory."""

    given: list[tuple[int, Any]]

    def __call__(self) -> Iterator[tuple[int, Any]]:
        return iter(self.given)


def _by_content(source: Source) -> Iterator[SourcePiece]:
    """Yield pieces of rows that must be read to be known."""
    assert source.rows is not None
    rows = iter(source.rows())
    while True:
        given = list(islice(rows, ROWS))
        digest = hashlib.blake2b(digest_size=16)
        for number, row in given:
            with explained(source.places.of(number)):
                text = f"{row!r}" if isinstance(row, TuneError) else exact_text(row)
            digest.update(f"{number} {text}\n".encode())
        yield SourcePiece(source.places, digest.hexdigest(), _Given(given), most=ROWS)


def reader_for(source: Iterable[tuple[str, Any]], reader: RowReader) -> tuple[RowReader, list[str]]:
    """The reader for the format of the first row that is an object, and the columns that it does not read."""
    found = next(((place, row) for place, row in source if isinstance(row, dict)), None)
    if isinstance(reader.format, str):
        load_function(reader.format, "format")
        if reader.columns:
            raise TuneError(f"columns: {reader.format} must itself return the columns of a format; remove columns")
        return reader, []
    if found is None:
        return reader, []
    place, row = found
    format = recognize(row, reader.columns, place, (reader.format,) if reader.format else FORMATS[reader.kind])
    if format.is_chat:
        reader.tokenizer.require_chat_template()
    used = {reader.columns.get(column, column) for column in (*format.columns, *format.optional)}
    used |= {*reader.extra_columns}
    return replace(reader, format=format), [name for name in row if name not in used]


def read_as(samples: Samples, reader: RowReader, ignored_columns: Sequence[str]) -> Samples:
    """The samples with the format of their rows, and the columns that it does not read, in the accounting."""
    format = reader.format.name if isinstance(reader.format, Format) else reader.format
    accounting = replace(samples.accounting, format=format, ignored_columns=[*ignored_columns])
    return replace(samples, accounting=accounting)


def require_few_bad_rows(counted: Accounting, max_bad_share: float, name: str, which: str = "") -> None:
    """Raise TuneError if the share of rows that cannot be used is above `max_bad_share`."""
    bad = counted.dropped[CANNOT_BE_USED]
    if bad > max_bad_share * counted.rows:
        share = f", more than max_bad_share={max_bad_share}" if max_bad_share else ""
        problem = f"{name}: {bad:,} of {which}{counted.rows:,} rows cannot be used{share}:"
        raise TuneError("\n  ".join([problem, *_by_error(counted.mistakes)]))


def _by_error(mistakes: list[str]) -> Iterator[str]:
    """A line for each error, after the places of its rows: `data.jsonl:1, 2, 3: no messages`."""
    places: dict[str, list[str]] = {}
    for place, _, error in (each.partition(": ") for each in mistakes):
        places.setdefault(error, []).append(place)
    for error, rows in places.items():
        file = rows[0].rpartition(":")[0]
        others = [each.removeprefix(f"{file}:") for each in rows[1:]]
        yield f"{', '.join([rows[0], *others])}: {error}"


def reader_settings(reader: RowReader) -> dict[str, Any]:
    """Everything that determines the tokens and labels of a row, except the tokenizer."""
    given = {field.name: getattr(reader, field.name) for field in fields(reader) if field.name != "tokenizer"}
    named = {"filter": reader.filter, "format": reader.format}
    functions = [sources_of(path, setting) for setting, path in named.items() if isinstance(path, str)]
    format = reader.format.name if isinstance(reader.format, Format) else reader.format
    return {**given, "format": format, "functions": functions}


def fit_settings(fit: Fit) -> dict[str, Any]:
    """Everything that determines what of the rows is trained on."""
    return {field.name: getattr(fit, field.name) for field in fields(fit)}


def render_settings(fit: Fit) -> list[Any]:
    """Everything that determines how conversations are cut."""
    return [fit.max_seq_len, fit.too_long == "split"]
