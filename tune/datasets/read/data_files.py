"""Find the data files of a path, local or on any file system of fsspec."""

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tune.errors import TuneError, explained
from tune.lookup import absent, did_you_mean, local_path

KINDS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
SEEKABLE = (".parquet", ".arrow")  # compressed internally
RUN = "run.json"  # marks the folder of a run
# Where data may come from. Others of fsspec's file systems run programs, or open further addresses out of files.
SCHEMES = ("file", "http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "memory")
NOT_DATA = ("dataset_info.json", "dataset_infos.json")

# The words in file names that mark a split, as on the Hugging Face hub.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def _zst(stream: IO[bytes]) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(stream, "zstd"))


DECOMPRESS: dict[str, Callable[[IO[bytes]], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zst}


@dataclass(frozen=True, slots=True)
class File:
    """A file, folder or glob. `path` is for the file system; `name` is what the user wrote, or relative to a folder."""

    filesystem: fsspec.AbstractFileSystem
    path: str
    name: str

    @property
    def kind(self) -> str:
        return _kind(self.path)

    @property
    def suffixes(self) -> str:
        """The suffixes of file type and compression, since the same bytes mean different things in other types."""
        return self.kind + _suffix(self.path)

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    @property
    def is_compressed(self) -> bool:
        return _suffix(self.path) in DECOMPRESS

    def open(self) -> IO[bytes]:
        """Open the file for reading, decompressed."""
        stream = self.filesystem.open(self.path, "rb")
        decompress = DECOMPRESS.get(_suffix(self.path))
        return decompress(stream) if decompress else stream

    def below(self) -> "list[File]":
        """All files in the folder and its subfolders, except hidden files and folders of runs.

        Symbolic links to folders are not followed, since they may form a cycle.
        """
        root = self.path.rstrip("/")
        names = sorted(os.path.relpath(path, root) for path in self.filesystem.find(root))
        runs = tuple(f"{os.path.dirname(name)}/" for name in names if self._is_of_run(f"{root}/{name}"))
        shown = (name for name in names if not re.search(r"(^|/)\.", name) and not name.startswith(runs))
        return [File(self.filesystem, f"{root}/{name}", name) for name in shown]

    def matching(self) -> "list[File]":
        """The files and folders that match the glob, except in folders of runs that the path does not name."""
        found = glob.glob(self.path, recursive=True) if self.is_local else self.filesystem.glob(self.path)
        named = os.path.dirname(re.split(r"[*?\[]", self.path)[0])
        folders = {parent for path in found for parent in PurePath(path).parents if len(str(parent)) > len(named)}
        runs = tuple(f"{folder}/" for folder in map(str, folders) if self._is_of_run(f"{folder}/{RUN}"))
        return [File(self.filesystem, path, path) for path in sorted(found) if not path.startswith(runs)]

    def _is_of_run(self, path: str) -> bool:
        """Whether this is the file in which a run records its starts."""
        if os.path.basename(path) != RUN or not self.filesystem.isfile(path):
            return False
        try:
            noted = json.loads(self.filesystem.cat_file(path))
        except ValueError:
            return False
        return isinstance(noted, dict) and "starts" in noted

    def saved_split(self, split: str) -> str | None:
        """The folder of this split, if `datasets.save_to_disk` wrote the folder."""
        if self.filesystem.isfile(f"{self.path}/dataset_dict.json"):
            splits = json.loads(self.filesystem.cat_file(f"{self.path}/dataset_dict.json"))["splits"]
            if split not in splits:
                raise TuneError(f"{self.name} has no split {split!r}; it has {', '.join(splits)}")
            return f"{self.name}/{split}"
        if not self.filesystem.isfile(f"{self.path}/state.json"):
            return None
        require_train(self.name, split)
        return self.name


def is_on_the_hub(path: str) -> bool:
    """Whether a path is the name of a dataset on the hub. Raises TuneError if it neither exists nor can be one."""
    local = local_path(path)
    if "://" in path or os.path.lexists(local) or glob.has_magic(path):
        return False
    is_path = local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
    if is_path or _kind(path) or ("/" in path and local.parent.is_dir()):
        if not local.parent.is_dir():
            raise TuneError(f"{local} {absent(local)} (there is no folder {local.parent} either)")
        siblings = [each.name for each in local.parent.iterdir()]
        raise TuneError(f"{local} {absent(local)}.{did_you_mean(local.name, siblings)}")
    return True


def place_at(path: str) -> File:
    """Open a path or URL. Raises TuneError if its scheme is not one of `SCHEMES`, if fsspec cannot open it, or if it
    does not exist."""
    scheme, is_url, rest = path.partition("://")
    if is_url and (scheme not in SCHEMES or "::" in rest):  # fsspec opens each part of a::b
        raise TuneError(
            f"{path} is not read. Use a local path or one URL that begins with {', '.join(SCHEMES)}; other data can be "
            "copied first, or come from a function (python:my_module.rows)"
        )
    absent_package = explained(f"{path} needs a package (pip install it)", ImportError)
    with explained(f"{path} cannot be opened", Exception), absent_package:  # each file system has its own errors
        if "://" in path:
            filesystem, root = fsspec.url_to_fs(path)
        else:
            filesystem, root = LocalFileSystem(), str(local_path(path))
        exists = filesystem.exists(root) or glob.has_magic(root)
    if not exists:
        leads = f" is a broken link (to {os.readlink(root)})" if os.path.islink(root) else " does not exist"
        raise TuneError(f"{path}{leads}")
    return File(filesystem, root, path)


def choose_files(place: File, split: str) -> tuple[list[File], list[str]]:
    """The data files, all of one kind, and the names of ignored files."""
    path, filesystem = place.name, place.filesystem
    if filesystem.isfile(place.path):
        require_train(path, split)
        if not _kind(path):
            suffix = "".join(Path(path).suffixes[-2:])
            is_table = suffix.lower() in SPREADSHEETS
            advice = ". In the spreadsheet program, save it as .csv" if is_table else ""
            raise TuneError(f"{path}: cannot read {suffix or 'such'} files. Supported: {_known()}{advice}")
        return [File(filesystem, place.path, os.path.basename(place.path))], []
    is_folder = filesystem.isdir(place.path)
    found = place.below() if is_folder else place.matching()
    if not (is_folder or found):
        raise TuneError(f"{path} matches no file")
    data = [file for file in found if file.kind and os.path.basename(file.name) not in NOT_DATA]
    data = [file for file in data if filesystem.isfile(file.path)]
    kinds = {file.kind for file in data}
    if len(kinds) > 1:
        kinds.discard(".txt")  # a README or a license
    if len(kinds) != 1:
        names = ", ".join(file.name for file in found[:10]) or "nothing"
        raise TuneError(f"{path} must hold data files of one kind ({_known()}); found {names}")
    data = [file for file in data if file.kind in kinds]
    if is_folder:
        data = _of_split(path, data, split)
    else:
        require_train(path, split)
    return data, sorted({file.name for file in found} - {file.name for file in data})


def _of_split(folder: str, files: list[File], split: str) -> list[File]:
    """The files whose path names the split, or all files if none names a split."""
    by_split: dict[str, list[File]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", file.name.lower())
        named = [known for known, aliases in SPLITS.items() if any(word in aliases for word in words)]
        by_split.setdefault(named[0] if named else "", []).append(file)
    if by_split.keys() == {""}:
        require_train(folder, split)
        return files
    if split not in by_split:
        names = {known: ", ".join(file.name for file in of_it[:5]) for known, of_it in by_split.items()}
        found = "; ".join(f"{known or 'no split'}: {listed}" for known, listed in names.items())
        raise TuneError(
            f"{folder} has no files of the split {split!r}. By their names, it has {found}. "
            f"Set split to one of these, or give a glob: {folder}/*{os.path.splitext(files[0].name)[1]}"
        )
    return by_split[split]


def require_train(path: str, split: str) -> None:
    if split != "train":
        raise TuneError(f"{path} has no splits: all rows belong to `train`. Remove split={split}")


def _kind(name: str) -> str:
    """The suffix of the file type, without compression; empty if the type is not supported."""
    suffix = _suffix(name)
    if suffix in DECOMPRESS:
        suffix = _suffix(os.path.splitext(name)[0])
        return suffix if suffix in KINDS and suffix not in SEEKABLE else ""
    return suffix if suffix in KINDS else ""


def _suffix(name: str) -> str:
    """The last suffix, in lower case."""
    return os.path.splitext(name)[1].lower()


def _known() -> str:
    return f"{', '.join(KINDS)}, and text compressed as {', '.join(DECOMPRESS)}"
