"""Files and folders that appear at their path only when they are complete."""

import glob
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tune.errors import TuneError

INDEX = "written.json"  # in an exported folder: its files, so that others in it are not lost when it is written again
HASHED_BYTES = 2**20  # larger files are known by their size
CHECKPOINT = "step-" + 8 * "[0-9]"  # names of complete checkpoints; other names are the user's own


@contextmanager
def written_aside(path: Path, folder: bool = False) -> Iterator[Path]:
    """A place beside `path` to write a file to, or files in a new folder; it is renamed to `path`, and replaces what is
    there, when the block ends. If the block raises, nothing stays. One process at a time may write a folder: what a
    killed one left of it is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    if folder:
        for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.unfinished"):
            shutil.rmtree(abandoned, ignore_errors=True)
        unfinished.mkdir()
    try:
        yield unfinished
        if folder:
            for file in unfinished.iterdir():  # safetensors makes files that only their owner may read
                file.chmod(unfinished.stat().st_mode & (0o777 if file.is_dir() else 0o666))
            shutil.rmtree(path, ignore_errors=True)
        unfinished.replace(path)
    finally:
        if folder:
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)


@contextmanager
def exported(folder: Path) -> Iterator[Path]:
    """As `written_aside`, for a folder that a user names: it replaces only what was written there in this way.

    Raises:
        TuneError: see `require_replaceable`.
    """
    require_replaceable(folder)
    with written_aside(folder, folder=True) as unfinished:
        yield unfinished
        text = json.dumps(_states(unfinished), indent=2) + "\n"
        (unfinished / INDEX).write_text(text, encoding="utf-8")


def require_replaceable(folder: Path) -> None:
    """Raises TuneError if an export to `folder` would delete a file that `exported` did not write, or that was changed
    since."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise TuneError(f"{folder} is a file. Name a folder that is absent or empty, or move the file")
    try:
        written = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        written = {}
    known = written if isinstance(written, dict) else {}
    if others := [name for name, state in _states(folder).items() if known.get(name) != state]:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise TuneError(
            f"{folder} holds files that an export did not write, or that were changed since, and they would be lost: "
            f"{', '.join(others[:3])}{more}. Move them or the folder, or name another one"
        )


def _states(folder: Path) -> dict[str, str]:
    """Size and digest of each file in a folder, and each folder without files, by relative path."""
    states = {}
    for each in sorted(folder.rglob("*")):
        name = str(each.relative_to(folder))
        if each.is_dir() and not each.is_symlink():
            if not any(each.iterdir()):
                states[name] = "empty folder"
        elif name != INDEX:
            size = each.stat().st_size if each.exists() else -1  # -1: a link to nothing
            digest = hashlib.sha256(each.read_bytes()).hexdigest() if 0 <= size <= HASHED_BYTES else ""
            states[name] = f"{size} {digest}"
    return states
