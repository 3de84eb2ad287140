"""Read the rows of one file, by its kind.

Files are read here and not through `datasets` for four reasons. Errors name the line. Columns keep the types in the
file, so that no row changes because of another. No cache is written. All ranks can read at once.
"""

import codecs
import contextlib
import csv
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tune.datasets.read.data_files import File
from tune.errors import TuneError, explained

NumberedRows = Iterator[tuple[int, Any]]
"""Rows, each with its number or line, from 1. A TuneError takes the place of a malformed row."""

GIT_POINTER = b"version https://git-lfs.github.com"
BLANKS = b"\xef\xbb\xbf \t\r\n"
_BLANKS = re.compile(r"[ \t\r\n]*")
OF_NUMBERS = "0123456789.eE+-"  # characters with which a number may go on
PART = 2**20  # bytes of a JSON list that are read at once
WRAPPERS = ("data", "rows", "examples", "samples", "instances", "records", "items")  # keys with the list of rows


@dataclass
class Skip:
    """The number of rows to skip before the first one that is read. Readers count it down."""

    left: int = 0


def rows_of(file: File, row_groups: Sequence[int] | None = None, skip: Skip | None = None) -> NumberedRows:
    """Yield a file's rows with their numbers, or those of some `row_groups` of Parquet, numbered from 1.

    Rows to `skip` keep their numbers. In files with a row a line, Parquet and Arrow they are not parsed.

    Raises TuneError, with the line if there are lines, if the file is damaged.
    """
    skip = skip or Skip()
    with explained(f"{file.path} cannot be read", OSError, EOFError, zlib.error, lzma.LZMAError):
        with file.filesystem.open(file.path, "rb") as stream:
            is_git_pointer = stream.read(len(GIT_POINTER)) == GIT_POINTER
        if is_git_pointer:
            raise _git_pointer(file)
        yield from READERS[file.kind](file, skip) if row_groups is None else _columnar(file, skip, row_groups)


def lines_between(file: File, start: int, stop: int) -> NumberedRows:
    """Yield the rows in the lines of a plain file between two bytes, numbered from 1."""
    with explained(f"{file.path} cannot be read", OSError), open(file.path, "rb") as stream:
        stream.seek(start)
        if not start and stream.read(len(GIT_POINTER)) == GIT_POINTER:
            raise _git_pointer(file)
        stream.seek(start)
        lines = stream.read(stop - start).split(b"\n")
    yield from _rows_of_lines(file, lines, Skip())


def row_groups_of(file: File, size: int) -> Iterator[tuple[list[int], int, int]]:
    """Yield neighboring row groups of a Parquet file of about `size` bytes together: their numbers, rows and bytes."""
    import pyarrow
    import pyarrow.parquet

    with explained(f"{file.path}: malformed Parquet", pyarrow.ArrowException), file.open() as stream:
        metadata = pyarrow.parquet.ParquetFile(stream).metadata
        groups, rows, total = list[int](), 0, 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            groups.append(number)
            rows, total = rows + group.num_rows, total + group.total_byte_size
            if total >= size:
                yield groups, rows, total
                groups, rows, total = [], 0, 0
        if groups:
            yield groups, rows, total


def numbered(tables: Iterable[Any], skip: Skip | None = None, number: int = 0) -> NumberedRows:
    """Yield the rows of Arrow tables or record batches, without nulls for keys that only other rows have.

    `number` is that of the row before the first table.
    """
    skip = skip or Skip()
    for table in tables:
        skipped = min(skip.left, table.num_rows)
        skip.left -= skipped
        number += skipped
        features = _features(table.schema)
        json_columns = {field.name for field in table.schema if _holds_json(field.type, features.get(field.name))}
        pieces = (table.slice(start, 1024) for start in range(skipped, table.num_rows, 1024))
        for row in (row for piece in pieces for row in piece.to_pylist()):
            number += 1
            row = {column: _pruned(value) for column, value in row.items()}
            try:
                for column in json_columns:
                    row[column] = _decoded(row[column], table.schema.field(column).type, features.get(column))
            except (ValueError, RecursionError) as error:
                row = TuneError(f"{column} is {_malformed(error)}")
            yield number, row


def _features(schema: Any) -> dict[str, Any]:
    """The columns' types as the package `datasets` has written them into the schema, if it has."""
    written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    return (written.get("info") or {}).get("features") or {}


def _holds_json(kind: Any, feature: Any) -> bool:
    """Whether values of an Arrow type are JSON texts, or have them inside, by the type itself or by its `feature`."""
    return _is_json(kind, feature) or any(_holds_json(*inside) for inside in _inside(kind, feature).values())


def _is_json(kind: Any, feature: Any) -> bool:
    is_feature = isinstance(feature, dict) and feature.get("_type") == "Json"
    return is_feature or getattr(kind, "extension_name", "") == "arrow.json"


def _inside(kind: Any, feature: Any) -> dict[str, tuple[Any, Any]]:
    """The Arrow types and features of a struct's fields, or of a list's items (under "")."""
    import pyarrow.types

    if pyarrow.types.is_struct(kind):
        of_fields = feature if isinstance(feature, dict) else {}
        return {field.name: (field.type, of_fields.get(field.name)) for field in kind}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        of_items = feature[0] if isinstance(feature, list) else (feature or {}).get("feature")
        return {"": (kind.value_type, of_items)}
    return {}


def _decoded(value: Any, kind: Any, feature: Any) -> Any:
    """A value with its JSON texts parsed, as `datasets` does for its type Json."""
    if _is_json(kind, feature):
        return json.loads(value, object_pairs_hook=_with_unique_keys) if isinstance(value, str | bytes) else value
    inside = _inside(kind, feature)
    if isinstance(value, dict):
        return {name: _decoded(item, *inside[name]) for name, item in value.items()}
    return [_decoded(item, *inside[""]) for item in value] if isinstance(value, list) and inside else value


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value


def _after(skip: Skip, rows: NumberedRows) -> NumberedRows:
    """Yield rows after those to skip, which had to be parsed."""
    for row in rows:
        if skip.left:
            skip.left -= 1
        else:
            yield row


def _json(file: File, skip: Skip) -> NumberedRows:
    """Read a list of rows, an object with such a list (`{"data": [...]}`), or one row per line."""
    if has_lines(file):
        yield from _json_lines(file, skip)
        return
    with file.open() as stream:
        head = stream.read(4096).lstrip(BLANKS)
    is_list = head.startswith(b"[") and b"\0" not in head  # else UTF-16, which is read whole
    try:
        yield from _after(skip, enumerate(_items(file) if is_list else _rows_inside(file), 1))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise TuneError(f"{file.path}{line}: {_malformed(error)}") from error


def _rows_inside(file: File) -> list[Any]:
    """The list of rows in an object, or the object as the only row."""
    with file.open() as stream:
        whole = json.loads(stream.read(), object_pairs_hook=_with_unique_keys)
    inside = [whole[name] for name in WRAPPERS if isinstance(whole, dict) and isinstance(whole.get(name), list)]
    return inside[0] if len(inside) == 1 else [whole]


def _items(file: File) -> Iterator[Any]:
    """Yield the items of a JSON list, which is read in parts."""
    text = JsonText(file)
    with contextlib.closing(text):
        text.skip("[", "Expecting value")
        more = text.next() != "]"
        while more:
            yield text.value()
            more = text.next() == ","
            if more:
                text.skip(",")
        text.skip("]", "Expecting ',' delimiter")
        text.skip("", "Extra data")


class JsonText:
    """The rest of a file of JSON. Errors have the line and column of the file."""

    def __init__(self, file: File) -> None:
        self.stream = file.open()
        self.decoder = json.JSONDecoder(object_pairs_hook=_with_unique_keys)
        self.utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at = "", 0
        self.lines = self.columns = 0  # before `text`

    def close(self) -> None:
        self.stream.close()

    def next(self) -> str:
        """The next character that is not blank, or "" at the end."""
        while True:
            self.at = _BLANKS.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or not self._read(PART):
                return self.text[self.at : self.at + 1]

    def skip(self, character: str, otherwise: str = "") -> None:
        """Skip a character; "" is the end. Raises JSONDecodeError with a message if another one follows."""
        if self.next() != character:
            raise self._placed(json.JSONDecodeError(otherwise, self.text, self.at))
        self.at += len(character)

    def value(self) -> Any:
        """The value that follows."""
        self.next()
        size = PART
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if not self._read(size):
                    raise self._placed(error) from None
                size *= 2  # so that reading a long value again and again takes linear time
                continue
            is_whole = end < len(self.text) and self.text[end] not in OF_NUMBERS
            if is_whole or not self._read(PART):
                self.at = end
                return value

    def _read(self, size: int) -> bool:
        """Read a part of the file, and drop what was passed; False at the end."""
        part = self.stream.read(size)
        more = self.utf8.decode(part, final=not part)
        if not part:
            return False
        passed, self.text = self.text[: self.at], self.text[self.at :]
        self.columns = len(passed) - passed.rfind("\n") - 1 + (0 if "\n" in passed else self.columns)
        self.lines += passed.count("\n")
        self.text, self.at = self.text + more, 0
        return True

    def _placed(self, error: json.JSONDecodeError) -> json.JSONDecodeError:
        """The error with its place in the file in place of that in the text."""
        if error.lineno == 1:
            error.colno += self.columns
        error.lineno += self.lines
        return error


def has_lines(file: File) -> bool:
    """Whether each line is a row: not a list, a single object, or an object over several lines."""
    with file.open() as stream:
        head = stream.read(4096).lstrip(BLANKS)
    if head.startswith(b"[") or not head:
        return not head
    with file.open() as stream:
        lines = filter(None, (line.strip(BLANKS) for line in stream))
        first, has_more = next(lines).decode(errors="replace"), next(lines, None) is not None
    try:
        json.loads(first)
    except json.JSONDecodeError as error:
        return error.pos < len(first)
    except (ValueError, RecursionError):
        return True
    return has_more


def _json_lines(file: File, skip: Skip) -> NumberedRows:
    with file.open() as lines:
        yield from _rows_of_lines(file, lines, skip)


def _rows_of_lines(file: File, lines: Iterable[bytes], skip: Skip) -> NumberedRows:
    otherwise = ", or the file one list of them" if file.kind == ".json" else ""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if skip.left:
            skip.left -= 1
        else:
            yield number, json_row(line.rstrip(b"\r\n"), otherwise)


def _git_pointer(file: File) -> TuneError:
    """The error for a file whose content is still on the Git server."""
    return TuneError(f"{file.path} is a Git LFS pointer, not the file itself. Run git lfs pull")


def json_row(line: str | bytes, otherwise: str = "") -> Any:
    """The row in a line of JSON, or a TuneError if the line is malformed."""
    try:
        return json.loads(line, object_pairs_hook=_with_unique_keys)
    except (ValueError, RecursionError) as error:
        text = line.decode(errors="replace") if isinstance(line, bytes) else line
        return TuneError(f"{_malformed(error)}: {_excerpt(text, error)}. Each line must be one complete row{otherwise}")


def _excerpt(line: str, error: Exception) -> str:
    """The part of a malformed line around the error, or its beginning."""
    position = error.pos if isinstance(error, json.JSONDecodeError) else 0
    begin, end = max(position - 40, 0), max(position + 20, 60)
    before = "..." if begin else ""
    after = "..." if end < len(line) else ""
    return f"`{before}{line[begin:end]}{after}`"


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict, but reject repeated keys, of which Python would silently keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return found


def _malformed(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        is_cut = error.pos >= len(error.doc.rstrip())
        end = " (the text ends inside a list or object)" if is_cut else ""
        return f"malformed JSON: {error.msg.removesuffix(' at')} at column {error.colno}{end}"
    return _not_text(error) if isinstance(error, UnicodeDecodeError) else f"malformed JSON: {error}"


def _csv(file: File, skip: Skip) -> NumberedRows:
    """Read a table. Rows to skip are parsed too: a cell may have several lines."""
    yield from _after(skip, _rows_of_table(file))


def _rows_of_table(file: File) -> NumberedRows:
    csv.field_size_limit(sys.maxsize)
    number = 0
    try:
        lines = _text_lines(file)
        header = next(lines, "")
        # Spreadsheets write CSV with semicolons or tabs in locales with a decimal comma.
        delimiter = "\t" if file.kind == ".tsv" else next((each for each in ",;\t" if each in header), ",")
        table = csv.DictReader(chain([header], lines), strict=True, delimiter=delimiter)
        names = table.fieldnames or ()
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise TuneError(f"{file.path}: the header has the column {twice[0]!r} twice")
        for number, row in enumerate(table, 1):
            if None in row or None in row.values():
                mistake = TuneError(
                    f"the row has {'more' if None in row else 'fewer'} cells than the header: "
                    "quote texts with separators or line breaks"
                )
                yield number, mistake
            else:
                yield number, row
    except csv.Error as error:
        raise TuneError(f"{file.path}:row {number + 1}: malformed CSV: {error}") from error


def _text_lines(file: File) -> Iterator[str]:
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TuneError(f"{file.path}:{number}: {_not_text(error)}") from error


def _columnar(file: File, skip: Skip, row_groups: Sequence[int] | None = None) -> NumberedRows:
    """Read Parquet, or Arrow as an IPC file or an IPC stream."""
    import pyarrow
    import pyarrow.parquet

    malformed = explained(f"{file.path}: malformed {file.kind[1:].title()}", pyarrow.ArrowException)
    with malformed, file.open() as stream:
        is_ipc_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        skipped = 0
        if file.kind == ".parquet":
            table = pyarrow.parquet.ParquetFile(stream)
            groups = [*(range(table.num_row_groups) if row_groups is None else row_groups)]
            # Metadata have the number of rows in each group: groups to skip are not read.
            while groups and table.metadata.row_group(groups[0]).num_rows <= skip.left:
                rows = table.metadata.row_group(groups.pop(0)).num_rows
                skip.left, skipped = skip.left - rows, skipped + rows
            batches = table.iter_batches(1024, groups)
        elif is_ipc_file:
            table = pyarrow.ipc.open_file(stream)
            batches = map(table.get_batch, range(table.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(stream)
        yield from numbered(batches, skip, skipped)


def _text(file: File, skip: Skip) -> NumberedRows:
    """Read the whole file as one document."""
    if skip.left:
        skip.left -= 1
    else:
        yield 1, {"text": "".join(_text_lines(file))}


def _not_text(error: UnicodeDecodeError) -> str:
    if error.object.startswith(b"\x1f\x8b"):
        return "gzip, not UTF-8 text: rename the file to end with .gz"
    return f"not UTF-8 text: {error.reason} at byte {error.start}. Save the file as UTF-8"


READERS: dict[str, Callable[[File, Skip], NumberedRows]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _columnar,
    ".arrow": _columnar,
    ".txt": _text,
}
