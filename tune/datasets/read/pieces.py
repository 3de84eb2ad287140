"""Cut a source into pieces, which are prepared and kept one by one.

The key of a piece is equal for equal content. Of a local file with a row a line, a piece is some of its bytes, so that
lines that are appended, or changed at one place, leave the other pieces as they are. Parquet is cut between its row
groups. Anything else is read from its beginning, and cut after a number of rows.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import xxhash

from tune.datasets.read.data_files import File
from tune.datasets.read.readers import NumberedRows, has_lines, lines_between, row_groups_of, rows_of
from tune.files import remembered

BYTES = 2**23  # of a piece with lines or row groups
ROWS = 2**15  # of any other piece


@dataclass(frozen=True)
class RowPlaces:
    """Names the rows of a piece of a file: "chats.jsonl:12", "chats.csv:row 12", or the file if it is one row."""

    name: str
    mark: str = ""
    first: int = 0  # rows or lines of the file before the piece

    def of(self, number: int) -> str:
        return f"{self.name}{self.mark}{self.first + number}" if self.mark else self.name


@dataclass(frozen=True)
class SourcePiece:
    """Rows of a source. `key` is equal for equal content; `most`: rows, if one with fewer of them is the last."""

    places: RowPlaces
    key: str
    rows: Callable[[], NumberedRows]
    bytes: int = 0
    most: int | None = None


@dataclass
class Cursor:
    """Reads rows in turn. Pieces that are not read are skipped; one that was passed is read from the beginning."""

    start: Callable[[], NumberedRows]
    at: int = 0
    rows: NumberedRows = field(default_factory=lambda: iter(()))
    is_open: bool = False

    def read(self, first: int, count: int) -> NumberedRows:
        """Yield rows [first, first + count)."""
        if not self.is_open or self.at > first:
            self.rows, self.at, self.is_open = self.start(), 0, True
        for numbered in itertools.islice(self.rows, first - self.at, first - self.at + count):
            self.at = max(self.at, first) + 1
            yield numbered


def mark_of(file: File) -> str:
    """What stands between the name of a file and the number of a row in the place of the row."""
    if file.kind == ".txt":
        return ""
    is_by_line = file.kind == ".jsonl" or (file.kind == ".json" and has_lines(file))
    return ":" if is_by_line else ":row "


def pieces_of(file: File, content: Callable[[File], str], memory: Path) -> Iterator[SourcePiece]:
    """Yield the pieces of a file. `content` gives its hash; `memory` is a folder that keeps what was found out.

    After a piece with fewer rows than `most`, there is no other one.
    """
    mark = mark_of(file)
    if file.is_local and mark == ":" and not file.is_compressed:
        for start, stop, first, digest in remembered(Path(file.path), memory, "lines", _cut_at_lines):
            places = RowPlaces(file.name, mark, first)
            yield SourcePiece(places, f"{file.kind} {digest}", partial(lines_between, file, start, stop), stop - start)
    elif file.is_local and file.kind == ".parquet":
        first = 0
        for number, (groups, rows, size) in enumerate(row_groups_of(file, BYTES)):
            places = RowPlaces(file.name, mark, first)
            yield SourcePiece(places, f"{content(file)} {number}", partial(rows_of, file, groups), size)
            first += rows
    else:
        yield from in_turn(RowPlaces(file.name, mark), content(file), partial(rows_of, file))


def in_turn(places: RowPlaces, content: str, rows: Callable[[], NumberedRows]) -> Iterator[SourcePiece]:
    """Yield pieces of rows that can only be read from the beginning, without end."""
    cursor = Cursor(rows)
    for index in itertools.count():
        read = partial(cursor.read, index * ROWS, ROWS)
        yield SourcePiece(places, f"{content} {index}", read, most=ROWS)


def _cut_at_lines(file: Path) -> list[tuple[int, int, int, str]]:
    """The pieces of a file with a row a line: (start, stop) in bytes, the lines before, and a hash of the bytes."""
    pieces, start, lines = [], 0, 0
    with file.open("rb") as stream:
        while block := stream.read(BYTES):
            block += stream.readline()
            pieces.append((start, start + len(block), lines, xxhash.xxh3_128_hexdigest(block)))
            start, lines = start + len(block), lines + block.count(b"\n")
    return pieces
