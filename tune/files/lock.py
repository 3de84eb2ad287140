"""The lock of a run folder: one process at a time writes there.

It is a POSIX lock. Processes that are forked from its holder do not have it. It goes when the holder closes any
descriptor of the file, so it is on a file that nothing else opens: not on one that is uploaded or read.
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
BEATS = 25.0  # seconds in which a run that goes on writes its heartbeat twice
_held: dict[Path, TextIO] = {}  # by this process


def hold(folder: Path, make: bool = False) -> None:
    """Lock a run folder until `release` or the end of this process. Without `make`, a folder in which no run has begun
    stays as it is. Where the file system has no locks, look whether the heartbeat of a run there goes on, which takes
    `BEATS` seconds if that has not ended. Raises TuneError if another process is writing there."""
    path = folder.resolve() / FILE
    if is_held_here(folder):
        return
    try:
        file = path.open("a" if make else "r+", encoding="utf-8")
    except OSError:  # there is none, or nobody may write there, as whoever wants to is told
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
            f"output_dir: another run is writing into {folder}. Wait for its end, or give another output_dir"
        )
    _held[path] = file


def release(folder: Path) -> None:
    if file := _held.pop(folder.resolve() / FILE, None):
        file.close()


def is_held_here(folder: Path) -> bool:
    """Whether this process has the lock of a folder, which may have been removed and made again."""
    path = folder.resolve() / FILE
    return path in _held and path.exists() and os.path.samestat(os.fstat(_held[path].fileno()), path.stat())


def is_held(folder: Path) -> bool:
    """Whether a process has the lock of a folder; where the file system has no locks, True."""
    if is_held_here(folder):  # to open the file would end the lock
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
    """Whether somebody writes heartbeat.json now. Clocks of two machines are not compared."""
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
