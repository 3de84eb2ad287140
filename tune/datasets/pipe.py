"""Take all rows of a source through the four steps, in chunks of 64 rows."""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

from tune.datasets.accounting import NAMES_SHOWN, Accounting
from tune.datasets.cache import TELL
from tune.datasets.fit import CANNOT_BE_USED
from tune.datasets.parse.columns import recognize
from tune.datasets.parse.formats import FORMATS
from tune.datasets.ray_data import map_by_ray
from tune.datasets.read.opening import Source
from tune.datasets.rows import RowReader
from tune.datasets.samples import Samples
from tune.datasets.user_functions import load_function
from tune.datasets.workers import map_chunks
from tune.errors import TuneError
from tune.secrets import without_secrets
from tune.terminal import visible

TRUSTED = 1000  # rows after which the share of bad rows is reliable


def chunks_of(
    source: Source, reader: RowReader, workers: int | None, start: int | None = None, by_ray: bool = False
) -> Iterator[Samples]:
    """Yield the samples of a source's rows; a stream passes `start` to skip its first rows.

    If no format is given, the first row decides it. Raises TuneError if too many rows are unusable: at the end, or as
    soon as the limit is exceeded after 1,000 rows. If no row may be unusable, stops at five of them, or at the first in
    a stream.
    """
    rows, peeked = iter(source), []
    ignored_columns: list[str] = []
    for place, row in rows:
        peeked.append((place, row))
        if isinstance(row, dict):
            reader, ignored_columns = _for_rows_like(row, place, reader)
            break
    samples_of = partial(reader.samples, ignored_columns=ignored_columns)
    if by_ray:
        chunks = map_by_ray(samples_of, lambda: islice(source, start, None), workers)
    else:
        chunks = map_chunks(samples_of, islice(chain(peeked, rows), start, None), workers)
    counted, most = Accounting(), reader.max_bad_share
    for chunk in chunks:
        counted += chunk.accounting
        enough = counted.rows >= TRUSTED if most else start is not None or len(counted.mistakes) == NAMES_SHOWN
        if enough:
            _require_few_bad_rows(counted, most, source.name, "the first ")
        yield chunk
    _require_few_bad_rows(counted, most, source.name)


def announced(chunks: Iterable[Samples], source: str) -> Iterator[Samples]:
    """Print the number of rows every ten seconds."""
    rows, start = 0, time.monotonic()
    last = start
    for chunk in chunks:
        yield chunk
        rows, now = rows + chunk.accounting.rows, time.monotonic()
        if now - last >= TELL:
            last = now
            speed = f"{rows / (now - start):,.0f} rows a second"
            print(f"preparing {visible(without_secrets(source))}: {rows:,} rows, {speed}", file=sys.stderr, flush=True)


def _require_few_bad_rows(counted: Accounting, max_bad_share: float, name: str, which: str = "") -> None:
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


def _for_rows_like(row: dict[str, Any], place: str, reader: RowReader) -> tuple[RowReader, list[str]]:
    """The reader for the format of a row, and the columns of the row that the format does not read."""
    if isinstance(reader.format, str):
        load_function(reader.format, "format")
        if reader.columns:
            raise TuneError(f"columns: {reader.format} must itself return the columns of a format; remove columns")
        return reader, []
    format = recognize(row, reader.columns, place, (reader.format,) if reader.format else FORMATS[reader.kind])
    if format.is_chat:
        reader.tokenizer.require_chat_template()
    used = {reader.columns.get(column, column) for column in (*format.columns, *format.optional)}
    used |= {*reader.extra_columns}
    return replace(reader, format=format), [name for name in row if name not in used]
