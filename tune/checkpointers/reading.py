"""Read DCP checkpoints without running code from them, unlike torch's reader and planner."""

import io
import json
import math
import operator
import pickle
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.serialization import _get_layout

from tune import rehearsal
from tune.checkpointers.disk import DIGESTS, found_damage, shape_differences
from tune.distributed import uncut
from tune.errors import TuneError, explained
from tune.files import CHECKPOINT, content_digest
from tune.quantization import NF4Weight

# Frozen parameters are not saved: they are loaded from the original checkpoint of the model.
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


class TrainedWeights:
    """The trained weights in `checkpoint`, the folder of a training state; `part` names the model if the state has
    several. Used like `Pretrained`."""

    def __init__(self, checkpoint: Path, part: str = ""):
        self.checkpoint, self.part = checkpoint, part

    def load(self, model: nn.Module) -> None:
        """Load this process's shards of all tensors of `model`; NF4 weights one at a time. Raises TuneError if the
        state is damaged or of another model."""
        if rehearsal.current():
            return
        self._require_sound()
        quantized = {name: module for name, module in model.named_modules() if isinstance(module, NF4Weight)}
        parts = {f"{name}.{part}" for name, module in quantized.items() for part, _ in module.named_parameters()}
        self._read({name: tensor for name, tensor in model.state_dict().items() if name not in parts})
        for name, module in quantized.items():
            rows, half = module.codes.shape
            whole = torch.empty(rows, 2 * half)
            self._read({name: whole})
            module.load(whole[module.local_rows()])

    def load_trained(self, model: nn.Module) -> None:
        """Like `load`, only for parameters that require a gradient."""
        if rehearsal.current():
            return
        self._require_sound()
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._read({name: parameter.data for name, parameter in trained.items()})

    def digest(self) -> dict[str, Any]:
        """Return a digest of the state's files. Raises TuneError if an early version wrote the state without
        digests."""
        if not (self.checkpoint / DIGESTS).exists():
            raise TuneError(
                f"{self.checkpoint} has no {DIGESTS}: an early version of tune wrote it. Export it with `tune export`"
            )
        return {"state": content_digest(self.checkpoint / DIGESTS)}

    def digest_of_base(self) -> str | None:
        """Return the digest of the base that an adapter in the state was trained on, if the state has it."""
        state = json.loads((self.checkpoint / "state.json").read_text(encoding="utf-8"))
        base = state.get("base")
        return base.get("xxh3") if isinstance(base, dict) else None

    def changed_frozen(self) -> list[str]:
        """Return the names of frozen parameters that the training loop changed. The state does not have them, except
        in `extra`."""
        state = json.loads((self.checkpoint / "state.json").read_text(encoding="utf-8"))
        changed: list[str] = state.get("changed", [])
        return changed

    def _require_sound(self) -> None:
        if damage := found_damage(self.checkpoint):
            raise TuneError(f"{self.checkpoint} is damaged: {damage}. Use an earlier checkpoint")

    def _read(self, tensors: dict[str, Any]) -> None:
        state: dict[str, Any] = {"model": {self.part: tensors} if self.part else tensors}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: no_dist
                dcp.load(state, storage_reader=Reader(self.checkpoint), planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise TuneError(f"{self.checkpoint} does not match this model: {cause_of(error)}") from error


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that `resume` names: the folder itself, or the newest of a run. Raises TuneError if it is
    not complete."""
    with explained(f"resume: {path} cannot be read", OSError):  # e.g. the name is too long, or no permission
        inside = sorted(path.glob(CHECKPOINT)) or sorted(path.glob(f"checkpoints/{CHECKPOINT}"))
        is_itself = path.name.startswith("step-") or not inside
        found = path if is_itself else inside[-1]
        is_complete = (found / ".metadata").exists() and (found / "state.json").exists()
    if not is_complete:
        raise TuneError(f"resume: {path} is neither a complete checkpoint (step-*) nor a run folder with one")
    return found


def require_none_later(step: int, newest: Path | None) -> None:
    """Raise TuneError if continuing after `step` would replace the newest checkpoint of the run folder."""
    if newest and newest.name > f"step-{step:08d}":
        raise TuneError(
            f"resume: continuing after step {step} would replace the later {newest}. Set another output_dir, or "
            "resume=auto to continue from the newest checkpoint"
        )


def cause_of(error: BaseException) -> str:
    """Return the cause of an error; for DCP's errors, the causes on all processes."""
    if not isinstance(error, CheckpointException):
        return str(error)
    causes = {str(failure[0]).rstrip(".") or repr(failure[0]) for failure in error.failures.values()}
    # torch's writer raises "unexpected pos" if the disk is full.
    return "; ".join(sorted("No space left on device" if "unexpected pos" in cause else cause for cause in causes))


def require_same(
    path: Path, saved: Mapping[str, Any], tensors: Mapping[str, Any], states: Iterable[str], others: Collection[str]
) -> None:
    """Raise TuneError if a checkpoint differs from this run: in its `tensors` ("model" and "extra"), ignoring `others`,
    or in the `states` of its optimizer. `saved` is the metadata of the checkpoint."""
    again = "Restore the settings of that run, or start over with resume=never and another output_dir"
    for kind, parts in tensors.items():
        inside = {name.removeprefix(f"{kind}."): each for name, each in saved.items() if name.startswith(f"{kind}.")}
        found = {name: list(getattr(each, "size", ())) for name, each in inside.items() if name not in others}
        wanted = {name: list(getattr(each, "shape", ())) for name, each in flatten_state_dict(parts)[0].items()}
        if differences := shape_differences(found, wanted, "here"):
            what = "state" if kind == "extra" else kind
            raise TuneError(f"resume: {path} has a different {what}:\n  {differences}\n{again}")
    had, has = {name.rpartition(".")[2] for name in saved if name.startswith("optimizer.")}, {*states}
    if had and had != has:  # an empty set: no step had a gradient yet
        names = [", ".join(sorted(each)) or "no states" for each in (had, has)]
        raise TuneError(f"resume: {path} has a different optimizer: it has {names[0]}, this run {names[1]}. {again}")


def require_continuable(path: Path, model: nn.Module, states: Iterable[str]) -> None:
    """Raise TuneError if names or sizes in a checkpoint do not match this model and an optimizer with these `states`.
    Reads no tensors."""
    tensors = get_model_state_dict(model, options=TRAINED)
    saved = Reader(path).read_metadata().state_dict_metadata
    require_same(path, saved, {"model": tensors}, states, elsewhere(model))


def cut_short(path: Path) -> str:
    """Describe damage to a checkpoint that the sizes of its files reveal; "" if there is none."""
    file = path / "state.json"
    try:
        json.loads(file.read_text(encoding="utf-8"))
        file = path / ".metadata"
        parts = (Reader(path).read_metadata().storage_data or {}).values()
    except (OSError, ValueError, TuneError):
        return f"{file.name} cannot be read"
    for file, end in ((path / part.relative_path, part.offset + part.length) for part in parts):
        if not file.exists() or file.stat().st_size < end:
            return f"{file.name} is truncated"
    return ""


def elsewhere(model: nn.Module) -> Collection[str]:
    """Return the names of tensors that only other pipeline stages have."""
    return uncut(model).state_dict().keys() - model.state_dict().keys()


def whole_states(path: Path, group: str, names: Collection[str]) -> dict[str, Any]:
    """Return empty targets for DCP to load the states of `group` with these names into: whole tensors without values,
    in the dicts and lists in which they were saved."""
    found = Reader(path).read_metadata()
    states: dict[str, Any] = {}
    for key, place in (found.planner_data or {}).items():
        if place[:1] == (group,) and place[1] in names:
            saved: Any = found.state_dict_metadata[key]
            is_tensor = isinstance(saved, metadata.TensorStorageMetadata)
            set_element(states, place[1:], torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None)
    return states


class Reader(dcp.FileSystemReader):
    """Read one checkpoint. Raises TuneError if its metadata is damaged or names classes other than DCP's."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as content:
                found = _MetadataUnpickler(content).load()
        except Exception as error:  # a damaged pickle can raise anything
            raise TuneError(
                f"resume: {file} was not opened ({error!r}): it is damaged, or opening it could run foreign code. "
                "Continue from an earlier checkpoint of your own"
            ) from error
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Planner(dcp.DefaultLoadPlanner):
    """Load plan that also reads non-tensor values with `weights_only`. Low-bit optimizer states (torchao) can only be
    cut between blocks; if a layout cuts them elsewhere, they are dequantized and quantized again."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        self.cut: dict[ReadItem, ReadItem] = {}  # read piece (a whole saved shard) -> wanted piece
        self.pieces: dict[metadata.MetadataIndex, list[tuple[ReadItem, Tensor]]] = defaultdict(list)
        of_optimizer = [item for item in plan.items if item.dest_index.fqn.startswith("optimizer.")]
        tensors = [item for item in of_optimizer if item.type is LoadItemType.TENSOR]
        block = max((getattr(self.lookup_tensor(item.dest_index), "block_size", 0) for item in tensors), default=0)
        for item in tensors if block else []:
            saved: Any = self.metadata and self.metadata.state_dict_metadata[item.storage_index.fqn]
            size = saved.chunks[item.storage_index.index].sizes
            target = self.lookup_tensor(item.dest_index).shape
            of_both = (item.storage_offsets, size), (item.dest_offsets, target)
            if not all(_is_of_blocks(start, whole, item.lengths, block) for start, whole in of_both):
                read = replace(item, storage_offsets=torch.Size([0] * len(size)), lengths=size)
                plan.items[plan.items.index(item)] = read
                self.cut[read] = item
        return plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return torch.empty(read_item.lengths) if read_item in self.cut else super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if (item := self.cut.get(read_item)) is None:
            return
        pieces = self.pieces[item.dest_index]
        pieces.append((item, narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths).clone()))
        if len(pieces) == sum(each.dest_index == item.dest_index for each in self.cut):
            target: Any = self.lookup_tensor(item.dest_index)
            numbers = target.dequantize() if hasattr(target, "block_size") else target
            for each, piece in self.pieces.pop(item.dest_index):
                narrow_tensor_by_index(numbers, each.dest_offsets, each.lengths).copy_(piece)
            target.copy_(numbers)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        try:
            torch.save(torch.load(value, weights_only=True), plain)
        except pickle.UnpicklingError as error:
            name = read_item.dest_index.fqn
            raise ValueError(f"{name} holds more than plain values, and opening it could run code") from error
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _is_of_blocks(offsets: torch.Size, size: torch.Size, lengths: torch.Size, block: int) -> bool:
    """Whether a piece of a tensor of this `size` is the whole tensor, or rows that begin and end between blocks."""
    row = math.prod(size[1:])
    rows = lengths[1:] == size[1:] and not any(each * row % block for each in (*offsets[:1], *lengths[:1]))
    return lengths == size or rows


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


KNOWN: dict[tuple[str, str], Any] = {
    **{
        (kind.__module__, kind.__name__): kind
        for kind in (
            metadata.Metadata, metadata.StorageMeta, metadata.MetadataIndex, metadata.BytesStorageMetadata,
            metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.ChunkStorageMetadata,
            metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size, _get_layout,
        )
    },
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
    ("builtins", "getattr"): operator.getitem,  # some versions of Python pickle enum members with it
}  # fmt: skip
