"""Keep what was prepared: blocks of tokenized rows, and datasets, which are numbers that lead into blocks.

Both are files that all processes map, named by a hash of everything that determines their content. A block is kept as
soon as it is finished, so that a preparation that ends in any way continues after it. A file is written under a
temporary name and renamed when it is complete. One process prepares a dataset; the others wait for its lock, a kernel
lock, which is released when the process ends in any way.

    blocks/KEY      the rows of a piece of a source, uncut: depends on the rows, the tokenizer and what is learned
    datasets/KEY    the samples of a source: depends on its pieces, and on the length, the held-out rows and the like
    prompts/KEY     prompts, as arrays
    windows/KEY-ROW the rows of a stream from which a run starts: see `kept_windows`
    files/KEY       hashes of large files
"""

import fcntl
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import save_file

from tune.datasets.read.data_files import File
from tune.datasets.read.opening import PlacedRows
from tune.datasets.rows import exact_text
from tune.errors import TuneError, explained
from tune.files import content_digest, written_aside
from tune.secrets import without_secrets

FORMAT_VERSION = 6
"""Raise it if the same rows give other samples or counts; tests/datasets/test_format_version.py then fails."""
TELL = 10.0  # seconds between progress lines
ABANDONED = 3600.0  # seconds after which a file that was not finished belongs to a killed process

# Names of the fields in a remote file's info that change with its content (ETag, Last-Modified, CRC).
CHANGES = re.compile("etag|modif|mtime|created|updated|md5|crc|sha|digest|checksum|hex|blob_id|generation", re.I)


def hash_of(*contents: Any) -> str:
    """A hash that is equal for equal JSON values."""
    return hashlib.blake2b(json.dumps(contents, sort_keys=True).encode(), digest_size=16).hexdigest()


def key_of(*contents: Any) -> str:
    """The name of what is kept for these values and the format version."""
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


def content_of_rows(rows: PlacedRows) -> str:
    """A hash of the rows of a source without files."""
    digest = hashlib.blake2b(digest_size=16)
    for place, row in rows:
        if isinstance(row, TuneError):
            digest.update(f"{row!r}\n".encode())
        else:
            with explained(place):
                digest.update(f"{exact_text(row)}\n".encode())
    return digest.hexdigest()


def prepared_arrays(
    write: Callable[[Mapping[str, BinaryIO]], dict[str, Any]],
    types: Mapping[str, str],
    final: Path,
    source: str,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Flat arrays of these types, mapped from the folder `final`, and what is stored about them.

    If the folder is missing or damaged, `write` gets an open file for each array, and returns what to store about them.

    Raises TuneError if `write` does, or if the folder cannot be written.
    """
    with writable(final.parent, source):
        found = _arrays(final, types)
        if found is not None:
            return found
        with locked(final.with_name(f"{final.name}.lock"), without_secrets(source)):
            found = _arrays(final, types)  # another process may have written them
            if found is not None:
                return found
            with written_aside(final, folder=True) as unfinished:
                with ExitStack() as stack:
                    files = {name: stack.enter_context(_array(unfinished, name, kind)) for name, kind in types.items()}
                    about = write(files)
                (unfinished / "about.json").write_text(json.dumps({"about": about}), encoding="utf-8")
            found = _arrays(final, types)
    assert found is not None
    return found


def _arrays(folder: Path, names: Iterable[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """The arrays in a folder and what is stored about them; None if it is missing or damaged."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))["about"]
        return {name: _mapped(folder / f"{name}.npy") for name in names}, about
    except FileNotFoundError:
        return None
    except OSError:  # reported with other advice
        raise
    except Exception:  # NumPy raises many errors for a damaged header
        return None


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


def _mapped(file: Path) -> np.ndarray:
    """Map an array. Raises ValueError if the file does not have the length in its header."""
    values = np.load(file, mmap_mode="c")
    if values.offset + values.nbytes != file.stat().st_size:
        raise ValueError(f"{file} is damaged")
    return np.asarray(values)


def keep(file: Path, arrays: dict[str, np.ndarray], rest: Any) -> None:
    """Write arrays and a JSON value into one file."""
    with written_aside(file) as unfinished:
        whole = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
        save_file(whole, unfinished, metadata={"rest": json.dumps(rest)})
        with unfinished.open("rb") as stream:
            os.fsync(stream.fileno())
        unfinished.chmod(0o644)


def kept(file: Path) -> tuple[dict[str, np.ndarray], Any] | None:
    """The arrays of a file, mapped, and its JSON value; None if it is missing or damaged."""
    try:
        content = np.memmap(file, np.uint8, "c")
        start = 8 + int(content[:8].view("<u8")[0])
        header = json.loads(content[8:start].tobytes())
        rest = json.loads(header.pop("__metadata__")["rest"])
        arrays, end = {}, 0
        for name, about in header.items():
            first, last = about["data_offsets"]
            dtype = np.dtype(DTYPES[about["dtype"]])
            arrays[name] = np.asarray(content[start + first : start + last]).view(dtype).reshape(about["shape"])
            end = max(end, last)
        if start + end != len(content):
            raise ValueError(f"{file} is damaged")
    except FileNotFoundError:
        return None
    except OSError:  # reported with other advice
        raise
    except Exception:  # a damaged header can raise anything
        return None
    return arrays, rest


DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


@contextmanager
def writable(folder: Path, source: str) -> Iterator[None]:
    """Report what the file system raises, with the name of the source and what to do."""
    try:
        yield
    except OSError as error:
        raise TuneError(
            f"{error.filename or folder}: {error.strerror}. The prepared samples of {without_secrets(source)} are "
            "stored there. Set cache_dir (or TUNE_CACHE in the environment) to a writable folder with free space"
        ) from error


@contextmanager
def locked(file: Path, source: str) -> Iterator[None]:
    """Hold a lock that belongs to this process alone; an flock lock would survive in forked processes.

    A process that waited for the lock raises the TuneError of its previous holder.
    """
    line = f"waiting for another process to prepare {source}"
    line_later = Timer(TELL, print, [line], {"file": sys.stderr, "flush": True})
    file.parent.mkdir(parents=True, exist_ok=True)
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
        _remove_abandoned(file.parent)
        try:
            yield
        except TuneError as error:
            lock.write(str(error))
            raise


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed processes did not finish."""
    for file in folder.glob("*/.*.unfinished"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > ABANDONED:
                file.unlink()


def _elsewhere(file: File) -> str:
    # The file system's own `ukey` does not detect changes: over https it hashes the URL, in archives the path.
    about = file.filesystem.info(file.path)
    if changing := {name: str(value) for name, value in about.items() if value and CHANGES.search(name)}:
        return hash_of(file.path, about.get("size"), changing)
    with file.filesystem.open(file.path, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
