"""Rows from files and from the Hugging Face hub.

Files are read here and not through `datasets`: a mistake is then told with its line, a column keeps the types it was
written with (no row changes because of another one), nothing is written to a cache, and ranks may read together.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tune.errors import TuneError

Rows = Iterator[tuple[str, Any]]


@dataclass
class Source:
    """Rows, each with its place ("chats.jsonl:12") for messages."""

    name: str
    rows: Rows
    ignored_files: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)  # none if the rows come from elsewhere


def open_source(path: str, split: str = "train", subset: str | None = None) -> Source:
    """A file, a folder of files of one kind, or a dataset on the hub. Raises TuneError if it is none of them."""
    local = Path(path).expanduser()
    if not local.exists():
        is_path = local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
        if is_path or local.suffix in READERS or ("/" in path and local.parent.is_dir()):
            raise _not_found(local)
        return Source(path, _hub(path, subset, split))
    if split != "train" or subset is not None:
        asked = f"split={split}" + (f", subset={subset}" if subset else "")
        raise TuneError(f"{path} is on disk, where all rows are the split `train`; found {asked}: remove it")
    if local.is_file():
        files, ignored = [local], []
        if local.suffix not in READERS:
            raise TuneError(f"{local}: cannot read {local.suffix or 'this'} files; known are {_known()}")
    else:
        entries = sorted(entry for entry in local.iterdir() if entry.is_file() and not entry.name.startswith("."))
        files = [entry for entry in entries if entry.suffix in READERS]
        ignored = [entry.name for entry in entries if entry.suffix not in READERS]
        kinds = sorted({file.suffix for file in files})
        if len(kinds) != 1:
            found = ", ".join(entry.name for entry in entries[:10]) or "nothing"
            raise TuneError(f"{local} must hold data files of one kind ({_known()}); found {found}")
    rows = (row for file in files for row in READERS[file.suffix](file))
    return Source(str(local), rows, ignored, files)


def _json(file: Path) -> Rows:
    """A list of rows, or one row per line."""
    with file.open("rb") as lines:
        is_list = lines.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_list:
        yield from _json_lines(file)
        return
    try:
        rows = json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise TuneError(f"{file}:{error.lineno}: malformed JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise TuneError(f"{file} is not UTF-8 text: {error}") from error
    yield from ((f"{file.name}:row {number}", row) for number, row in enumerate(rows, 1))


def _json_lines(file: Path) -> Rows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield f"{file.name}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise TuneError(
                    f"{file}:{number}: malformed JSON: {error.msg} at column {error.colno}: {line[:60]!r}... "
                    "Each line must be one whole row"
                ) from error
            except UnicodeDecodeError as error:
                raise TuneError(f"{file}:{number}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _csv(file: Path) -> Rows:
    csv.field_size_limit(sys.maxsize)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            for number, row in enumerate(csv.DictReader(lines, strict=True), 1):
                if None in row:
                    raise TuneError(
                        f"{file}:row {number} has more cells than the header: a text with commas needs quotes"
                    )
                yield f"{file.name}:row {number}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise TuneError(f"{file}: malformed CSV: {error}") from error


def _parquet(file: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches(1024) for row in batch.to_pylist())
            yield from ((f"{file.name}:row {number}", _pruned(row)) for number, row in enumerate(rows, 1))
    except pyarrow.ArrowException as error:
        raise TuneError(f"{file}: malformed Parquet: {error}") from error


READERS: dict[str, Callable[[Path], Rows]] = {".json": _json, ".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet}


def _hub(name: str, subset: str | None, split: str) -> Rows:
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise TuneError(
            f"{name} is no file or folder here, and it cannot be loaded from the Hugging Face hub "
            f"(subset={subset}, split={split}): {error}"
        ) from error
    yield from ((f"{name}:row {number}", _pruned(row)) for number, row in enumerate(rows, 1))


def _pruned(row: dict[str, Any]) -> dict[str, Any]:
    """Without the nulls that columnar formats put in for each key that only other rows have."""
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _known() -> str:
    return ", ".join(READERS)


def _not_found(path: Path) -> TuneError:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, siblings, n=1)
    hint = f"; did you mean {path.with_name(close[0])}?" if close else ""
    folder = "" if path.parent.is_dir() else f" (there is no folder {path.parent} either)"
    return TuneError(f"{path} does not exist{folder}{hint}")
