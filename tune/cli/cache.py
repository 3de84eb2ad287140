"""List the prepared data that are kept: source, samples, tokens and size; with --empty, remove them.

Blocks of tokenized rows are shared by datasets that differ in length, held-out rows and the like."""

import re
import shutil
import time
from argparse import ArgumentParser
from pathlib import Path

from tune.cli.output import gib, print_table
from tune.errors import TuneError
from tune.files import cache_folder
from tune.terminal import visible

FOLDERS = ("blocks", "datasets", "prompts", "windows", "files")
DAY = 86400.0


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("--cache-dir", help="the folder (default: $TUNE_CACHE or ~/.cache/tune)")
    parser.add_argument("--empty", action="store_true", help="remove all, or what --older-than says")
    parser.add_argument("--older-than", type=float, default=0.0, metavar="DAYS", help="only what was used before")
    options = parser.parse_args(arguments)
    if options.older_than and not options.empty:
        parser.error("--older-than says what --empty removes: add --empty")
    folder = cache_folder(options.cache_dir)
    before = time.time() - options.older_than * DAY
    if options.empty:
        _empty(folder, before)
    else:
        _list(folder)


def _list(folder: Path) -> None:
    """Print a line for each dataset, and the sizes of all."""
    from tune.datasets import kept  # NumPy takes half a second to import

    rows = [["source", "samples", "tokens", "MiB of blocks", "days"]]
    used: set[str] = set()
    for file in sorted((folder / "datasets").glob("[!.]*"), key=_used, reverse=True):
        found = kept(file)
        if found is None:
            continue
        about = found[1]
        blocks = {name for key, rendered, *_ in about["parts"] for name in (key, rendered) if name}
        used |= blocks
        sizes = sum(_size(folder / "blocks" / name) for name in blocks)
        counts, days = about["accounting"], (time.time() - _used(file)) / DAY
        samples, tokens = f"{counts['samples']:,}", f"{counts['tokens']:,}"
        rows.append([visible(counts["source"]), samples, tokens, f"{sizes / 2**20:,.1f}", f"{days:.0f}"])
    if len(rows) > 1:
        print_table(rows)
    unused = [file for file in (folder / "blocks").glob("[!.]*") if file.name not in used]
    of_unused = sum(map(_size, unused)) / 2**30
    of_earlier = sum(_size_below(entry) for entry in _earlier(folder)) / 2**30
    parts = f"{of_unused:.2f} in blocks of no dataset, {of_earlier:.2f} in formats of earlier versions"
    print(f"{folder}: {gib(folder)} GiB, of which {parts}. To remove all: tune cache --empty")


def _empty(folder: Path, before: float) -> None:
    """Remove what was last used before a time, in seconds since 1970."""
    if not folder.is_dir():
        raise TuneError(f"{folder} does not exist: nothing is kept")
    removed = size = 0
    entries = [entry for name in FOLDERS for entry in (folder / name).glob("*")]
    for entry in [*entries, *_earlier(folder), *folder.glob("*.lock")]:
        if _used(entry) > before:
            continue
        removed, size = removed + 1, size + _size_below(entry)
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    print(f"removed {removed:,} files and folders with {size / 2**30:.2f} GiB from {folder}")


def _earlier(folder: Path) -> list[Path]:
    """The folders that earlier versions wrote: each a copy of the tokens of a dataset."""
    return [entry for entry in folder.glob("*") if re.fullmatch(r"[0-9a-f]{32}", entry.name) and entry.is_dir()]


def _used(path: Path) -> float:
    """When a file was last read or written, as far as the file system notes it."""
    status = path.stat()
    return max(status.st_atime, status.st_mtime)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _size_below(path: Path) -> int:
    return _size(path) if path.is_file() else sum(_size(file) for file in path.rglob("*"))
