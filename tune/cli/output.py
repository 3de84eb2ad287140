"""Output that verbs share: new folders, tables, and the command that serves a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tune.errors import TuneError
from tune.lookup import in_shell
from tune.terminal import visible


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Wrap the code that writes `out`. Raises TuneError if `out` is not empty or cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TuneError(f"{out} already exists. Name a folder that is absent or empty.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise TuneError(f"{error.filename or out}: {error.strerror or error}") from error
    print(visible(f"wrote {out}"))


def served_by(model: Any, out: Path) -> str:
    """Return the command that serves the folder, and for a reward model how to request scores."""
    command = f"vllm serve {in_shell(out)}"
    if not getattr(model.config, "scores", False):
        return command
    asked = '# POST /classify with "use_activation": false returns the scores, and without it their sigmoid'
    return f"{command} --runner pooling\n  {asked}\n  # in transformers: AutoModelForSequenceClassification"


def gib(folder: Path) -> str:
    """Return the size of all files in a folder, in GiB."""
    size = 0
    for file in (each for each in folder.rglob("*") if each.is_file()):
        with suppress(FileNotFoundError):  # a running run removes files
            size += file.stat().st_size
    return f"{size / 2**30:.2f}"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    rows = [[visible(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
