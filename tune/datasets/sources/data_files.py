"""Which files a path stands for, on this machine or wherever fsspec reads."""

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
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tune.errors import TuneError
from tune.lookup import did_you_mean

KINDS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
SEEKABLE = (".parquet", ".arrow")  # they have a compression of their own
GIT_POINTER = b"version https://git-lfs.github.com"
NOT_DATA = ("dataset_info.json", "dataset_infos.json")

# The words by which files of a split are known, as the Hugging Face hub knows them.
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
    """`name` is its path below the folder it was found in."""

    filesystem: fsspec.AbstractFileSystem
    path: str
    name: str

    @property
    def kind(self) -> str:
        return _kind(self.path)

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    @property
    def is_git_pointer(self) -> bool:
        """Whether the file was left on a Git server."""
        with self.filesystem.open(self.path, "rb") as stream:
            return stream.read(len(GIT_POINTER)) == GIT_POINTER

    def open(self) -> IO[bytes]:
        """The bytes in it, decompressed."""
        stream = self.filesystem.open(self.path, "rb")
        decompress = DECOMPRESS.get(os.path.splitext(self.path)[1])
        return decompress(stream) if decompress else stream


@dataclass(frozen=True, slots=True)
class Tree:
    """A path on a file system; `path` is as the user wrote it, `root` as the file system knows it."""

    filesystem: fsspec.AbstractFileSystem
    path: str
    root: str

    def below(self) -> dict[str, str]:
        """Paths of all that is in the folder and in those below it, by name, without hidden ones. Links to folders
        stay closed: they may lead in circles."""
        root = self.root.rstrip("/")
        if isinstance(self.filesystem, LocalFileSystem):
            found = (path for path in Path(root).rglob("*") if path.is_symlink() or not path.is_dir())
            names = [str(path.relative_to(root)) for path in found]
        else:
            names = [path.removeprefix(root).lstrip("/") for path in self.filesystem.find(root)]
        return {name: f"{root}/{name}" for name in sorted(names) if not re.search(r"(^|/)\.", name)}

    def matching(self) -> dict[str, str]:
        """Paths of the files and folders that the path as a glob stands for, by name."""
        is_local = isinstance(self.filesystem, LocalFileSystem)
        found = glob.glob(self.root, recursive=True) if is_local else self.filesystem.glob(self.root)
        return {path: path for path in sorted(found)}

    def saved_split(self, split: str) -> str | None:
        """The folder of this split if `datasets.save_to_disk` wrote this one."""
        if self.filesystem.isfile(f"{self.root}/dataset_dict.json"):
            splits = json.loads(self.filesystem.cat_file(f"{self.root}/dataset_dict.json"))["splits"]
            if split not in splits:
                raise TuneError(f"{self.path} has no split {split!r}; it has {', '.join(splits)}")
            return f"{self.path}/{split}"
        if not self.filesystem.isfile(f"{self.root}/state.json"):
            return None
        require_train(self.path, split)
        return self.path


def is_on_the_hub(path: str) -> bool:
    """Whether a path that is not there can be the name of a dataset on the hub; raises TuneError if it cannot."""
    local = Path(path).expanduser()
    if "://" in path or os.path.lexists(local) or glob.has_magic(path):
        return False
    is_path = local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
    if is_path or _kind(path) or ("/" in path and local.parent.is_dir()):
        raise _not_found(local)
    return True


def open_tree(path: str) -> Tree:
    """Raises TuneError for a URL that fsspec cannot open, or a path that leads nowhere."""
    try:
        if "://" in path:
            filesystem, root = fsspec.url_to_fs(path)
        else:
            filesystem, root = LocalFileSystem(), str(Path(path).expanduser())
        exists = filesystem.exists(root) or glob.has_magic(root)
    except ImportError as error:
        raise TuneError(f"{path}: {error}: pip install that package") from error
    except Exception as error:  # each file system has its own
        raise TuneError(f"{path} cannot be opened: {error}") from error
    if not exists:
        leads = f" is a link that leads nowhere ({os.readlink(root)})" if os.path.islink(root) else " does not exist"
        raise TuneError(f"{path}{leads}")
    return Tree(filesystem, path, root)


def choose_files(tree: Tree, split: str) -> tuple[list[File], list[str]]:
    """The data files, all of one kind, and the names of those that are left aside."""
    if tree.filesystem.isfile(tree.root):
        require_train(tree.path, split)
        if not _kind(tree.path):
            suffix = "".join(Path(tree.path).suffixes[-2:])
            raise TuneError(f"{tree.path}: cannot read {suffix or 'such'} files; known are {_known()}")
        return [File(tree.filesystem, tree.root, os.path.basename(tree.root))], []
    is_folder = tree.filesystem.isdir(tree.root)
    paths = tree.below() if is_folder else tree.matching()
    if not (is_folder or paths):
        raise TuneError(f"{tree.path} matches no file")
    data = [name for name in paths if _kind(name) and os.path.basename(name) not in NOT_DATA]
    data = [name for name in data if tree.filesystem.isfile(paths[name])]
    kinds = {_kind(name) for name in data}
    if len(kinds) > 1:
        kinds.discard(".txt")  # a README or a license
    if len(kinds) != 1:
        found = ", ".join([*paths][:10]) or "nothing"
        raise TuneError(f"{tree.path} must hold data files of one kind ({_known()}); found {found}")
    data = [name for name in data if _kind(name) in kinds]
    if is_folder:
        data = _of_split(tree.path, data, split)
    else:
        require_train(tree.path, split)
    return [File(tree.filesystem, paths[name], name) for name in data], sorted(paths.keys() - data)


def _of_split(folder: str, names: list[str], split: str) -> list[str]:
    """The files whose path names the split, or all of them if none names any."""
    by_split: dict[str, list[str]] = {}
    for name in names:
        words = re.split(r"[^a-z]+", name.lower())
        named = [known for known, aliases in SPLITS.items() if any(word in aliases for word in words)]
        by_split.setdefault(named[0] if named else "", []).append(name)
    if by_split.keys() == {""}:
        require_train(folder, split)
        return names
    if split not in by_split:
        found = "; ".join(f"{known or 'no split'}: {', '.join(of_it[:5])}" for known, of_it in by_split.items())
        raise TuneError(
            f"{folder} has no files of the split {split!r}; by their names it has {found}. "
            f"Set split to one of these, or name the files: {folder}/*{os.path.splitext(names[0])[1]}"
        )
    return by_split[split]


def require_train(path: str, split: str) -> None:
    if split != "train":
        raise TuneError(f"{path} has no splits: all rows are the split `train`; found split={split}: remove it")


def _kind(name: str) -> str:
    """The suffix below that of the compression; empty if it is none that can be read."""
    stem, suffix = os.path.splitext(name)
    if suffix in DECOMPRESS:
        suffix = os.path.splitext(stem)[1]
        return suffix if suffix in KINDS and suffix not in SEEKABLE else ""
    return suffix if suffix in KINDS else ""


def _known() -> str:
    return f"{', '.join(KINDS)}, and text compressed as {', '.join(DECOMPRESS)}"


def _not_found(path: Path) -> TuneError:
    if not path.parent.is_dir():
        return TuneError(f"{path} does not exist (there is no folder {path.parent} either)")
    return TuneError(f"{path} does not exist.{did_you_mean(path.name, [each.name for each in path.parent.iterdir()])}")
