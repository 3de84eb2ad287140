"""Write files and folders that appear at their path only when they are complete."""

import glob
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from tune.errors import TuneError

INDEX = "written.json"  # lists the files of an exported folder, so that a new export does not delete others
CHECKPOINT = "step-" + 8 * "[0-9]"  # names of complete checkpoints; other names belong to the user


@contextmanager
def written_aside(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path` for a file, or for the files of a new folder.

    When the block ends, it is renamed to `path` and replaces what is there. If the block raises, it is deleted. Only
    one process at a time may write a folder: leftovers of killed processes are deleted first, and a folder that was
    being replaced is put back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = f".{path.name}.{secrets.token_hex(4)}"
    unfinished, replaced = path.with_name(f"{name}.unfinished"), path.with_name(f"{name}.replaced")
    if folder:
        for old in path.parent.glob(f".{glob.escape(path.name)}.*.replaced"):
            _put_back(old, path)
        for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.unfinished"):
            shutil.rmtree(abandoned, ignore_errors=True)
        unfinished.mkdir()
    try:
        yield unfinished
        if folder:
            for file in unfinished.iterdir():  # safetensors creates files that only their owner can read
                file.chmod(unfinished.stat().st_mode & (0o777 if file.is_dir() else 0o666))
            if path.exists():  # a rename does not replace a folder that has files
                path.replace(replaced)
        unfinished.replace(path)
    finally:
        if folder:
            shutil.rmtree(unfinished, ignore_errors=True)
            _put_back(replaced, path)
        else:
            unfinished.unlink(missing_ok=True)


def _put_back(old: Path, path: Path) -> None:
    """Rename the folder `old` back to `path`, or delete it if `path` is there."""
    if old.exists() and not path.exists():
        old.replace(path)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def exported(folder: Path) -> Iterator[Path]:
    """Like `written_aside`, for a folder that a user names: only replaces files that an earlier export wrote.

    Raises:
        TuneError: see `require_replaceable`.
    """
    require_replaceable(folder)
    with written_aside(folder, folder=True) as unfinished:
        yield unfinished
        text = json.dumps(_states(unfinished), indent=2) + "\n"
        (unfinished / INDEX).write_text(text, encoding="utf-8")


def require_replaceable(folder: Path) -> None:
    """Raise TuneError if an export to `folder` would delete a file that `exported` did not write, or a changed file."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise TuneError(f"{folder} is a file. Choose a new or empty folder, or move the file")
    try:
        written = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        written = {}
    known = written if isinstance(written, dict) else {}
    if others := [name for name, state in _states(folder).items() if known.get(name) != state]:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise TuneError(
            f"{folder} contains files that no export wrote, or that have changed since, and they would be lost: "
            f"{', '.join(others[:3])}{more}. Move them or the folder, or choose another folder"
        )


def _states(folder: Path) -> dict[str, str]:
    """The size and digest of each file in a folder, and its empty folders, by relative path."""
    states = {}
    for each in sorted(folder.rglob("*")):
        name = str(each.relative_to(folder))
        if each.is_dir() and not each.is_symlink():
            if not any(each.iterdir()):
                states[name] = "empty folder"
        elif name != INDEX:
            states[name] = _state(each) if each.exists() else "broken link"
    return states


def _state(file: Path) -> str:
    """The size and a digest of all bytes: a file that is changed in place often keeps its size."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
    return f"{file.stat().st_size} {digest}"
