"""Read tensors of a checkpoint folder from safetensors or torch files, and detect damaged files."""

import contextlib
import hashlib
import json
import pickle
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import Tensor

from tune.errors import TuneError
from tune.files import WHOLE, content_digest, weight_files, written_aside
from tune.models import read_json

DIGESTS = "digests.json"
POINTER = b"version https://git-lfs.github.com/spec/"
ABOUT_THE_WRITER = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class DiskTensor:
    """A tensor in a safetensors or a torch file, not yet read."""

    name: str
    file: Path
    shape: list[int]
    dtype: torch.dtype

    @property
    def files(self) -> set[Path]:
        return {self.file}

    def read(self, where: tuple[slice, ...] = ()) -> Tensor:
        """Read only the slice `where`."""
        # The file is opened for each tensor: while it is open, all pages that were read stay in memory.
        if self.file.suffix == ".safetensors":
            with safe_open(self.file, framework="pt") as tensors:
                return tensors.get_slice(self.name)[where or ...]
        return load_torch_file(self.file)[self.name][where].clone()


def disk_tensors(folder: Path) -> dict[str, DiskTensor]:
    """Return every tensor of a checkpoint by name, as it is stored (see `plain_tensors`). Reads only the headers of
    its `weight_files`.

    Raises:
        TuneError: no weights, or files are missing, damaged, or do not match the index.
    """
    files = weight_files(folder)
    if files and files[0].suffix == ".json":
        return _indexed(files[0])
    if files:
        if files[0].name not in WHOLE:
            _require_all_shards(files)
        return _disjoint(files)
    others = sorted(child.name for child in folder.glob("*") if child.suffix in (".pt", ".pth", ".gguf"))
    hint = f"; found {', '.join(others)}: see `tune convert --help`" if others else ""
    raise TuneError(f"no *.safetensors or pytorch_model*.bin in {folder}{hint}")


def unread_weights(folder: Path, tensors: Mapping[str, DiskTensor]) -> list[str]:
    """Return the names of weight files in `folder` that hold none of `tensors`: they belong to another set."""
    read = {file.name for tensor in tensors.values() for file in tensor.files}
    files = {file.name for pattern in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern)}
    return sorted(name for name in files - read if not name.startswith("adapter_"))


def shape_differences(found: Mapping[str, list[int]], wanted: Mapping[str, list[int]], source: str) -> str:
    """Return a line per tensor that is missing, unknown or of another shape, at most 12. `source` introduces the
    wanted shape."""
    lines = [f"missing: {name} {shape}" for name, shape in wanted.items() if name not in found]
    lines += [f"not known: {name} {shape}" for name, shape in found.items() if name not in wanted]
    lines += [
        f"{name} has shape {found[name]}, {source} {shape}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    return "\n  ".join(lines[:12] + ([f"and {len(lines) - 12} more"] if len(lines) > 12 else []))


def require_floats(tensors: Iterable[DiskTensor], setting: str) -> None:
    """Raise TuneError, naming `setting`, if one of the weights `tensors` has an integer dtype."""
    if found := [tensor for tensor in tensors if not tensor.dtype.is_floating_point]:
        kind = str(found[0].dtype).removeprefix("torch.")
        raise TuneError(
            f"{setting}: {found[0].name} in {found[0].file} has dtype {kind} ({len(found)} in total), but "
            "weights must be floating-point. Quantized weights cannot be trained without their scales: use the "
            "original checkpoint, or save it with transformers in bf16"
        )


def sampled_digest(names: Iterable[str], files: Iterable[Path]) -> str:
    """Return a digest of `names`, of the files' sizes, and of samples of their bytes."""
    digest = hashlib.sha256("".join(names).encode())
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(size.to_bytes(8))
        with file.open("rb") as content:
            for sample in range(64):
                content.seek(size * sample // 64)
                digest.update(content.read(4096))
    return digest.hexdigest()


def model_digest(folder: Path, tensors: Iterable[DiskTensor]) -> str:
    """Return a digest of the model in a folder: of config.json, except fields about its writer, and of
    all bytes of the files of its `tensors`, which are only read again when they change."""
    files = {file for tensor in tensors for file in tensor.files}
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    about = {name: value for name, value in config.items() if name not in ABOUT_THE_WRITER}
    contents = [about, *sorted((file.name, content_digest(file)) for file in files)]
    return xxhash.xxh3_128_hexdigest(json.dumps(contents, sort_keys=True).encode())


def digest_of(file: Path) -> str:
    """Return a digest of all bytes of a file."""
    with file.open("rb") as content:
        return f"xxh3:{hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()}"


def gather_digests(folder: Path, group: dist.ProcessGroup) -> dict[str, str]:
    """Return the `digest_of` each file of a checkpoint that the processes wrote. Each process reads its own files,
    which are still in its machine's page cache. Raises OSError on all processes if one fails."""
    mine: dict[str, str] | None = None
    found: list[Any] = [None] * dist.get_world_size(group)
    with contextlib.suppress(OSError):
        mine = {file.name: digest_of(file) for file in folder.glob(f"__{dist.get_rank(group)}_*")}
    dist.all_gather_object(found, mine, group)
    if None in found:
        raise OSError(f"process {found.index(None)} cannot read the files that it wrote")
    return {**ChainMap(*found)}


def write_digests(folder: Path, digests: Mapping[str, str], *others: str) -> None:
    """Write the digests of files of `folder`; digests of `others` are computed here."""
    digests = {**digests} | {name: digest_of(folder / name) for name in others}
    with written_aside(folder / DIGESTS) as unfinished:
        unfinished.write_text(json.dumps(digests, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def replace_json(file: Path, value: Any) -> None:
    """Replace a file that has a digest. The digests of its earlier contents are kept, newest last. So neither an
    interruption nor an older copy of the file looks like damage."""
    digests = (
        json.loads((file.parent / DIGESTS).read_text(encoding="utf-8")) if (file.parent / DIGESTS).exists() else {}
    )
    with written_aside(file) as unfinished:
        unfinished.write_text(json.dumps(value), encoding="utf-8")
        if digests:  # early versions wrote none
            before = digests[file.name] if digests[file.name].startswith("xxh3:") else digest_of(file)
            digests[file.name] = f"{before} {digest_of(unfinished)}"
            write_digests(file.parent, digests)


def found_damage(folder: Path, share: int = 0, shares: int = 1) -> str:
    """Return a description of the first damaged file, or "". Reads all bytes of each file; with several `shares`, only
    every `shares`-th file. Checkpoints of earlier versions have no digests, or digests of samples."""
    if not (folder / DIGESTS).exists():
        return ""
    try:
        digests = sorted(json.loads((folder / DIGESTS).read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError):
        return f"{DIGESTS} cannot be read"
    for name, digest in digests[share::shares]:
        file = folder / name
        try:
            found = digest_of(file) if digest.startswith("xxh3:") else sampled_digest([], [file])
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found not in digest.split():
            return f"{name} does not match its digest"
    return ""


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _indexed(index: Path) -> dict[str, DiskTensor]:
    folder, weight_map = index.parent, read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise TuneError(f"{index} is not a valid index of tensors: it lacks a weight_map from names to files")
    names = sorted(set(weight_map.values()))
    if outside := [file for file in names if Path(file).name != file]:
        raise TuneError(
            f"{index} names files in other folders: {', '.join(outside)}. Shards must be in the folder of their index"
        )
    if missing := [file for file in names if not (folder / file).is_file()]:
        raise TuneError(f"{index} names files that do not exist: {', '.join(missing)}. Download them")
    found = _disjoint([folder / file for file in names])
    places = {name: tensor.file.name for name, tensor in found.items()}
    if wrong := sorted({name for name, _ in places.items() ^ weight_map.items()}):
        listing = "\n  ".join(f"{name}: {places.get(name)}, {weight_map.get(name)}" for name in wrong[:12])
        raise TuneError(
            f"{index} and its files are of different checkpoints. Tensor: its file, and the file in the index:\n"
            f"  {listing}\nDownload them again, or remove the index to load all tensors in the files"
        )
    return found


def _disjoint(files: list[Path]) -> dict[str, DiskTensor]:
    tensors: dict[str, DiskTensor] = {}
    for file in files:
        for tensor in headers(file):
            if tensor.name in tensors:
                raise TuneError(f"{tensor.name} is in both {file} and {tensors[tensor.name].file}: remove one file")
            tensors[tensor.name] = tensor
    return tensors


def _require_all_shards(files: list[Path]) -> None:
    """Raise TuneError if shards named like ...-00001-of-00003 are missing."""
    for file in files:
        if match := re.fullmatch(r"(.*-)\d+(-of-(\d+)\.\w+)", file.name):
            start, end, count = match.groups()
            shards = [f"{start}{number:0{len(count)}d}{end}" for number in range(1, int(count) + 1)]
            if missing := [shard for shard in shards if not (file.parent / shard).exists()]:
                raise TuneError(f"{file.parent} has no {', '.join(missing)}. Download them again")


def headers(file: Path) -> Iterator[DiskTensor]:
    """Yield the tensors of one file. Raises TuneError if it is damaged or a git-lfs pointer."""
    with file.open("rb") as content:
        if content.read(len(POINTER)) == POINTER:
            raise TuneError(
                f"{file} is a git-lfs pointer, not the file itself. Fetch the file: git -C {file.parent} lfs pull"
            )
    if file.suffix != ".safetensors":
        for name, tensor in load_torch_file(file).items():
            yield DiskTensor(name, file, list(tensor.shape), tensor.dtype)
        return
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                header = tensors.get_slice(name)
                yield DiskTensor(name, file, header.get_shape(), SAFETENSORS_DTYPES[header.get_dtype()])
    except SafetensorError as error:
        raise TuneError(f"{file} is damaged ({error}). Download it again") from error


def metadata_of(file: Path) -> dict[str, str]:
    """Return the texts in the header of a safetensors file that `headers` has read."""
    with safe_open(file, framework="pt") as tensors:
        return tensors.metadata() or {}


def load_torch_file(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a torch file by name, memory-mapped: only the used parts are read."""
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise TuneError(
            f"{file} was not opened: it holds more than tensors, and opening it could run code of its author. "
            "Use the checkpoint's safetensors, or, if you trust the author, load it and save only its state dict"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise TuneError(
            f"{file} cannot be read ({error}). If it is damaged, download it again. If it has the format of torch "
            f"before 1.6, convert it: torch.save(torch.load('{file.name}', weights_only=True), '{file.name}')"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        kinds = {key: type(value).__name__ for key, value in content.items()} if isinstance(content, dict) else content
        raise TuneError(f"{file} must hold tensors by name; found {str(kinds)[:200]}")
    return content


SAFETENSORS_DTYPES: dict[str, Any] = {**_TYPES, "F8_E8M0": torch.float8_e8m0fnu}
