"""Check the request for an evaluation and the file for its results."""

import glob
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tune import rehearsal
from tune.errors import TuneError
from tune.types import PositiveFloat


def require_work(
    tasks: Sequence[str], path: str | None, score: Any, limit: PositiveFloat | None, log_samples: bool, out: str | None
) -> None:
    """Check the request for an evaluation before anything is read. `path` is the data file, `out` the file of results.
    Creates the folder of `out`. Raises TuneError."""
    if score and not path:
        raise TuneError("score: needs prompts to answer: give a data file (--data FILE, or dataset.path)")
    if not tasks and not path:
        raise TuneError("there is nothing to evaluate on: give tasks, or a data file (--data FILE, or dataset.path)")
    if limit and path and limit % 1:
        raise TuneError(f"limit: {limit} is a share, which only tasks support; for a data file give a number of rows")
    if log_samples and not out:
        raise TuneError("log_samples: samples are written next to the results; set out=results.json")
    if out:
        made = [folder for folder in Path(out).parents if not folder.exists()]
        try:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=Path(out).parent):
                if Path(out).is_dir():
                    raise IsADirectoryError("it is a folder")
        except (OSError, ValueError) as error:
            raise TuneError(f"out: {out} cannot be written: {error}. Name a JSON file") from error
        for folder in made if rehearsal.current() else ():
            folder.rmdir()
        _require_results(Path(out), log_samples)


def _require_results(out: Path, log_samples: bool) -> None:
    """Raise TuneError if results or their samples would replace another kind of file."""
    others = sorted(out.parent.glob(f"{glob.escape(out.stem)}_samples_*.jsonl"))
    if log_samples and others and not out.exists():
        raise TuneError(f"out: samples would replace {others[0]}. Choose another file for results, or move this one")
    if not out.exists() or not out.stat().st_size:
        return
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or "results" not in found:
        raise TuneError(f"out: {out} holds no results of an evaluation, but would be replaced. Choose another file")
