"""Hash all bytes of a file, once."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from tune.files.atomic import written_aside
from tune.lookup import local_path

LARGE = 2**24  # bytes from which on a file's hash is stored
_known: dict[str, Any] = {}  # file state -> what was found out


def cache_folder(given: str | None) -> Path:
    """`given`, else $TUNE_CACHE, else ~/.cache/tune."""
    return local_path(given or os.environ.get("TUNE_CACHE") or "~/.cache/tune")


def content_digest(file: Path, memory: Path | None = None) -> str:
    """A hash of all bytes of a file. The hash of a large file is stored until the file changes, in this process and in
    the folder `memory` (default: the cache)."""
    return remembered(file, memory or cache_folder(None) / "files", "digest", _digest)


def remembered(file: Path, memory: Path, what: str, find_out: Callable[[Path], Any]) -> Any:
    """The JSON value that `find_out` returns for a file. For a large file it is stored until the file changes, in this
    process and in the folder `memory`, under a name that depends on `what` it is."""
    status = file.stat()
    # Writing to a file changes its ctime, which cannot be set back.
    state = [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
    key = xxhash.xxh3_128_hexdigest(json.dumps([what, *state]).encode())
    if key in _known:
        return _known[key]
    kept = memory / key
    with suppress(OSError, ValueError):
        return _known.setdefault(key, json.loads(kept.read_text(encoding="utf-8")))
    value = find_out(file)
    # A file that is being written can change twice within one clock tick.
    if status.st_size >= LARGE and time.time() - status.st_ctime > 2:
        _known[key] = value
        with suppress(OSError), written_aside(kept) as unfinished:
            unfinished.write_text(json.dumps(value), encoding="utf-8")
    return value


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
