"""Whether an evaluation has something to do, and a place for its results."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tune.errors import TuneError


def require_work(
    tasks: Sequence[str], path: str | None, score: Any, limit: float | None, log_samples: bool, out: str | None
) -> None:
    """Check what is asked of an evaluation before anything is read. `path` is that of the data, `out` the file of the
    results. Nothing is left at `out`, but its folder is made. Raises TuneError."""
    if score and not path:
        raise TuneError("score: it needs prompts to answer: give a data file (--data FILE, or dataset.path)")
    if not tasks and not path:
        raise TuneError("there is nothing to evaluate on: give tasks, or a data file (--data FILE, or dataset.path)")
    if limit and path and limit % 1:
        raise TuneError(f"limit: {limit} is a share, which tasks have; of a data file give a number of rows")
    if log_samples and not out:
        raise TuneError("log_samples: samples are written next to the results: say where, out=results.json")
    if out:
        try:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=Path(out).parent):
                if Path(out).is_dir():
                    raise IsADirectoryError("it is a folder")
        except (OSError, ValueError) as error:
            raise TuneError(f"out: {out} cannot be written: {error}. Name a JSON file") from error
