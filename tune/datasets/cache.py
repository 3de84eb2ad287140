"""Cache prepared samples in files that all processes map.

The name of a cache folder is a hash of everything that determines its content: see `key_of`. The process that holds the
lock writes the folder under a temporary name and renames it when it is complete; the others wait for the lock. It is a
kernel lock, which is released when the process ends in any way.
"""

import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any, BinaryIO

import numpy as np

from tune.datasets.accounting import Accounting
from tune.datasets.read.data_files import File
from tune.datasets.samples import OF_SAMPLES, Samples, write
from tune.errors import TuneError
from tune.files import content_digest, written_aside
from tune.secrets import without_secrets

ARRAYS = ("tokens", "labels", *OF_SAMPLES)
FORMAT_VERSION = 5
"""Raise it if the same rows give other samples or counts; tests/datasets/test_format_version.py then fails."""
TELL = 10.0  # seconds between progress lines

# Names of the fields in a remote file's info that change with its content (ETag, Last-Modified, CRC).
CHANGES = re.compile("etag|modif|mtime|created|updated|md5|crc|sha|digest|checksum|hex|blob_id|generation", re.I)


def hash_of(*contents: Any) -> str:
    """A hash that is equal for equal JSON values."""
    return hashlib.blake2b(json.dumps(contents, sort_keys=True).encode(), digest_size=16).hexdigest()


def key_of(*contents: Any) -> str:
    """The name of the cache folder for these values and the format version."""
    return hash_of(FORMAT_VERSION, *contents)


def content_of(files: Iterable[File], folder: Path) -> list[str]:
    """For each file, its suffixes and a hash of its bytes.

    `folder` stores the hash of a large file until the file changes. The hash of a remote file covers its path, size and
    the fields that match `CHANGES`, if its file system has any, else its bytes.
    """
    return [
        f"{file.suffixes} {content_digest(Path(file.path), folder / 'files') if file.is_local else _elsewhere(file)}"
        for file in files
    ]


def prepared(
    chunks: Iterable[Samples],
    key: str,
    folder: Path,
    source: str = "the dataset",
    ignored_files: Iterable[str] = (),
    files: Sequence[str] = (),
) -> Samples:
    """The samples with this key, mapped from cache files, which are first written from `chunks` if missing.

    `files` are the names of the source's files, which may differ from the names when the cache was written.

    Raises TuneError if `chunks` does, or if the folder cannot be written.
    """
    final, source = folder / key, without_secrets(source)
    try:
        samples = _read(final, files)
        if samples is not None:
            accounting = samples.accounting.from_cache(str(final), (final / "about.json").stat().st_mtime)
            return replace(samples, accounting=accounting.with_source(source, ignored_files))
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock", source):
            if _read(final, files) is None:
                with written_aside(final, folder=True) as unfinished:
                    _write(chunks, unfinished, source, files)
    except OSError as error:
        raise TuneError(
            f"{error.filename or folder}: {error.strerror}. The prepared samples of {source} are stored there. Set "
            "cache_dir (or TUNE_CACHE in the environment) to a writable folder with free space"
        ) from error
    samples = _read(final, files)
    assert samples is not None
    return replace(samples, accounting=samples.accounting.with_source(source, ignored_files))


def _write(chunks: Iterable[Samples], folder: Path, source: str, files: Sequence[str]) -> None:
    with _array(folder, "tokens", "<i4") as tokens, _array(folder, "labels", "<i4") as labels:
        about = write(chunks, source, tokens, labels)
    columns = about.pop("columns")
    arrays = {name: about.pop(name) for name in OF_SAMPLES}
    weights = about.pop("weights")
    if weights is not None:
        arrays["weights"] = weights
    for name, values in (arrays | {f"column-{name}": values for name, values in columns.items()}).items():
        with _array(folder, name, values.dtype.str) as file:
            file.write(values.data)
    about |= {"is_weighted": weights is not None, "columns": list(columns), "accounting": vars(about["accounting"])}
    about |= {"files": [*files]}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


@contextmanager
def _array(folder: Path, name: str, dtype: str) -> Iterator[BinaryIO]:
    """Open a flat .npy file for appending; on exit, its header gets the final length and the file is synced to disk."""
    header: dict[str, Any] = {"descr": dtype, "fortran_order": False}
    with (folder / f"{name}.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (0,)})
        start = file.tell()
        yield file
        count = (file.tell() - start) // np.dtype(dtype).itemsize
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (count,)})
        assert file.tell() == start  # numpy leaves room for the shape to grow
        file.flush()
        os.fsync(file.fileno())


def _read(folder: Path, files: Sequence[str]) -> Samples | None:
    """The samples in a folder; None if it is missing or damaged."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        names = [*ARRAYS, *["weights"] * about.pop("is_weighted"), *(f"column-{name}" for name in about["columns"])]
        arrays = {name: _mapped(folder / f"{name}.npy") for name in names}
    except FileNotFoundError:
        return None
    except OSError:  # reported with other advice
        raise
    except Exception:  # NumPy raises many errors for a damaged header: a bad zip file, a number that is too large
        return None
    columns = {name: arrays.pop(f"column-{name}") for name in about.pop("columns")}
    accounting = Accounting.from_dict(about.pop("accounting"))
    renamed = {before: now for before, now in zip(about.pop("files"), files, strict=False) if before != now}
    fields: dict[str, Any] = {**arrays, **about, "columns": columns, "accounting": accounting, "renamed": renamed}
    return Samples(**fields)


def _mapped(file: Path) -> np.ndarray:
    """Map an array. Raises ValueError if the file does not have the length in its header."""
    values = np.load(file, mmap_mode="c")
    if values.offset + values.nbytes != file.stat().st_size:
        raise ValueError(f"{file} is damaged")
    return np.asarray(values)


@contextmanager
def _locked(file: Path, source: str) -> Iterator[None]:
    """Hold a lock that belongs to this process alone; an flock lock would survive in forked processes.

    A process that waited for the lock raises the TuneError of its previous holder.
    """
    line = f"waiting for another process to prepare {source}"
    line_later = Timer(TELL, print, [line], {"file": sys.stderr, "flush": True})
    with file.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if os.environ.get("RANK", "0") == "0":
                line_later.start()
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX)
            finally:
                line_later.cancel()
            lock.seek(0)
            if problem := lock.read():
                raise TuneError(problem) from None
        lock.truncate(0)
        try:
            yield
        except TuneError as error:
            lock.write(str(error))
            raise


def _elsewhere(file: File) -> str:
    # The file system's own `ukey` does not detect changes: over https it hashes the URL, in archives the path.
    about = file.filesystem.info(file.path)
    if changing := {name: str(value) for name, value in about.items() if value and CHANGES.search(name)}:
        return hash_of(file.path, about.get("size"), changing)
    with file.filesystem.open(file.path, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
