"""Files and folders that appear at their path only when they are complete."""

import glob
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
