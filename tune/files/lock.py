"""Lock a run folder, so that only one process at a time writes to it.

It is a POSIX lock, which forked processes do not inherit. It is released when its holder closes any descriptor of the
file, so it is on a file of its own that nothing else reads or uploads.
"""

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from tune.errors import TuneError

FILE = ".lock"
BEATS = 25.0  # seconds in which an active run writes its heartbeat twice
_held: dict[Path, TextIO] = {}  # locks of this process


def hold(folder: Path, make: bool = False) -> None:
    """Lock a run folder until `release` or the end of this process.

    Without `make`, a folder in which no run has started is left unchanged. If the file system does not support locks,
    checks for a heartbeat of an active run instead, for up to `BEATS` seconds. Raises TuneError if another process is
    writing to the folder.
    """
    path = folder.resolve() / FILE
    if is_held_here(folder):
        return
    try:
        file = path.open("a" if make else "r+", encoding="utf-8")
    except OSError:  # missing, or not writable, which is reported when something is written
        if make:
            raise
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except (BlockingIOError, PermissionError):
        is_free = False
    except OSError:
        is_free = not _beats(folder)
    if not is_free:
        file.close()
        raise TuneError(
            f"output_dir: another run is writing to {folder}. Wait until it ends, or set another output_dir"
        )
    _held[path] = file


def release(folder: Path) -> None:
    """Release the lock of a folder, if this process holds it."""
    if file := _held.pop(folder.resolve() / FILE, None):
        file.close()


def is_held_here(folder: Path) -> bool:
    """Whether this process holds the lock of a folder; False if the folder was deleted and created again."""
    path = folder.resolve() / FILE
    return path in _held and path.exists() and os.path.samestat(os.fstat(_held[path].fileno()), path.stat())


def is_held(folder: Path) -> bool:
    """Whether any process holds the lock of a folder; True if the file system does not support locks."""
    if is_held_here(folder):  # opening the file here would release the lock
        return True
    try:
        with (folder / FILE).open(encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _beats(folder: Path) -> bool:
    """Whether heartbeat.json is being written. Does not compare clocks of two machines."""
    beat, began = _content(folder / "heartbeat.json"), time.monotonic()
    if not beat or _state(folder / "run.json") != "running":
        return False
    while (same := _content(folder / "heartbeat.json") == beat) and time.monotonic() - began < BEATS:
        time.sleep(0.5)
    return not same


def _state(file: Path) -> Any:
    try:
        found = json.loads(_content(file))
    except ValueError:
        return None
    return found.get("state") if isinstance(found, dict) else None


def _content(file: Path) -> bytes:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""
