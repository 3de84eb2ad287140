"""Load the initial weights of a model and gather its trained weights, sharded or not."""

import operator
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tune import rehearsal
from tune.checkpointers.disk import (
    DiskTensor,
    model_digest,
    require_floats,
    shape_differences,
    unread_weights,
)
from tune.checkpointers.packed import plain_tensors, quantization
from tune.collators import Pictures
from tune.distributed import Dtype, allocate, as_dtype, check_plan, from_its_stage, full_tensor, local_shard
from tune.errors import TuneError, explained
from tune.models import (
    ConfigFile,
    Decoder,
    HuggingFaceModel,
    Names,
    OnDisk,
    build,
    disk_names,
    disk_parts,
    hf,
    stored_tensors,
)
from tune.quantization import NF4Weight
from tune.tokenizers import Tokenizer
from tune.types import NonNegativeInt, checked


@checked
class Pretrained:
    """The weights of a checkpoint folder, for `model`.

    The constructor compares names and shapes, also on the meta device; `load` reads the values. A score head that the
    checkpoint lacks is initialized from `seed`.

    Raises:
        TuneError: files are missing or unreadable; tensors are missing, unknown or of another shape (all are named);
            weights have an integer dtype. The error names `setting`.
    """

    def __init__(self, path: str, model: nn.Module, seed: NonNegativeInt = 0, setting: str = "model.path"):
        self.path, self.model, self.seed, self.setting = path, model, seed, setting
        with explained(setting):
            quantization(Path(path))
        if rehearsal.planning():
            model.source = path  # type: ignore[assignment]
            self.tensors, self.names, self.new = dict[str, DiskTensor](), dict[str, OnDisk](), list[str]()
            return
        with explained(setting):
            self.tensors = plain_tensors(Path(path))
        if others := unread_weights(Path(path), self.tensors):
            read = ", ".join(sorted({file.name for tensor in self.tensors.values() for file in tensor.files})[:3])
            warnings.warn(
                f"{path} holds several sets of weights. Read: {read}. Not read: {', '.join(others[:3])} ({len(others)} "
                "files in total). Remove the set that you do not want",
                stacklevel=2,
            )
        model.source = path  # type: ignore[assignment]  # adapters look up its config.json
        names = Names.of(model)
        self.names = names.in_checkpoint(self.tensors)
        self.new = [name for name in names.replaced if self.names[name] not in self.tensors]
        for name in self.new:
            del self.names[name]
        stored, wanted = stored_tensors(model), dict[str, list[int]]()
        for name, on_disk in self.names.items():
            wanted |= {each: list(part.shape) for each, part in disk_parts(on_disk, stored[name])}
        for copy, name in names.copies.items():
            if copy in self.tensors:
                wanted[copy] = list(stored[name].shape)
        used = (each for each in self.tensors.items() if each[0] in wanted or not names.is_ignored(each[0]))
        found = {name: tensor.shape for name, tensor in used}
        if differences := shape_differences(found, wanted, "config.json says"):
            raise TuneError(f"{setting}: the tensors in {path} do not match its config.json:\n  {differences}")
        weights = [on_disk for name, on_disk in self.names.items() if stored[name].is_floating_point()]
        require_floats([self.tensors[each] for on_disk in weights for each in disk_names(on_disk)], setting)

    def require_complete(self) -> None:
        """Raise TuneError if a score head would be initialized."""
        if self.new:
            raise TuneError(
                f"{self.setting}: {self.path} has no score.weight, so it is not a reward model. Train one with "
                "reward_finetune"
            )

    def digest(self) -> dict[str, Any]:
        """Return a digest of config.json and of all bytes of the weights, and the settings of quantization."""
        digest = model_digest(Path(self.path), self.tensors.values())
        settings = "model.quantization=null"
        if quantized := next((module for module in self.model.modules() if isinstance(module, NF4Weight)), None):
            double = str(quantized.ranges is not None).lower()
            settings = f"model.quantization=nf4 model.double_quantization={double}"
        return {"xxh3": digest, "quantization": settings}

    def state_dict(self) -> dict[str, Any]:
        """Return the digest and the path of the weights."""
        return self.digest() | {"path": self.path}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise TuneError if the state is of other weights or of another quantization. Restores nothing."""
        if state | (now := self.digest()) != state:
            raise TuneError(
                f"resume: the checkpoint was trained on {state.get('path', 'a base')} with {state['quantization']}; "
                f"{self.path} with {now['quantization']} has other weights or another config.json. Restore model.path "
                "and model.quantization, or start over with resume=never and another output_dir"
            )

    def read(self, name: str) -> Tensor:
        """Read the full tensor for the model's parameter `name`, in its dtype on disk."""
        on_disk = self.names[name]
        if isinstance(on_disk, str):
            return self.tensors[on_disk].read()
        members = [[names] if isinstance(names, str) else names for names in on_disk]
        return torch.stack([torch.cat([self.tensors[each].read() for each in names]) for names in members])

    def load(self, model: nn.Module) -> None:
        """Load this process's slices into `model`, in the model's dtypes. Parameters that were added later are
        untouched."""
        if rehearsal.current():
            return
        here = dict(model.named_modules())  # a pipeline stage has only some of them
        with torch.no_grad():
            for name, on_disk in self.names.items():
                if name.rpartition(".")[0] not in here:
                    continue
                target = operator.attrgetter(name)(model)
                if isinstance(target, NF4Weight):
                    assert isinstance(on_disk, str)  # only linear layers are quantized
                    target.load(self.tensors[on_disk].read((target.local_rows(),)))
                else:
                    load_shard(target, on_disk, self.tensors)
            initialize(model, self.new, self.seed)


def load_shard(parameter: Tensor, on_disk: OnDisk, tensors: Mapping[str, DiskTensor]) -> None:
    """Load this process's slice of `parameter` from the `tensors` named in `on_disk`."""
    shard, where = local_shard(parameter)
    if isinstance(on_disk, str):
        shard.copy_(tensors[on_disk].read(where))
        return
    _, rows, *others = where
    for member, names in zip(shard, on_disk[where[0]], strict=True):
        begin = 0
        for part in [tensors[name] for name in ([names] if isinstance(names, str) else names)]:
            start, stop = max(rows.start - begin, 0), min(rows.stop - begin, part.shape[0])
            if start < stop:
                at = begin + start - rows.start
                member[at : at + stop - start].copy_(part.read((slice(start, stop), *others)))
            begin += part.shape[0]


def hf_tensors(
    model: nn.Module, found: Collection[str] = (), base: Pretrained | None = None, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield name on disk and full tensor, one by one, of a model that may be sharded, adapted and quantized.

    All processes must iterate, since each tensor is gathered in turn. Adapters are merged in fp32. Frozen tensors are
    read from `base`, the original weights, if given. Names follow a checkpoint with the tensors `found`, including
    tensors that it has twice. Names on disk in `without` are skipped.
    """
    names = Names.of(model)
    on_disk = names.in_checkpoint(found)
    for name, full in full_tensors(model, base, {name for name in on_disk if disk_names(on_disk[name])[0] in without}):
        yield from disk_parts(on_disk[name], full)
        yield from (
            (copy, full.clone()) for copy, original in names.copies.items() if original == name and copy in found
        )
        del full  # free it before the next one is gathered


def full_tensors(
    model: nn.Module, base: Pretrained | None = None, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Like `hf_tensors`, with the model's own names."""
    here = dict(model.named_modules())
    for name in Names.of(model).on_disk:
        if name in without:
            continue
        owner, _, kind = name.rpartition(".")
        yield name, from_its_stage(model, _full_tensor(here[owner], name, kind, base) if owner in here else None)


def changed_tensors(model: nn.Module) -> set[str]:
    """Return the model's names of the tensors in this process that are trained or have an adapter."""
    here, changed = dict(model.named_modules()), set[str]()
    for name in Names.of(model).on_disk:
        owner, _, kind = name.rpartition(".")
        if owner in here:
            is_adapted = kind == "weight" and getattr(here[owner], "merged", None) is not None
            if is_adapted or getattr(getattr(here[owner], kind), "requires_grad", False):
                changed.add(name)
    return changed


def _full_tensor(module: nn.Module, name: str, kind: str, base: Pretrained | None) -> Tensor:
    tensor = getattr(module, kind)
    if base is not None and not getattr(tensor, "requires_grad", False):
        full = base.read(name)
    else:
        full = tensor.full() if isinstance(tensor, NF4Weight) else full_tensor(tensor.detach())
    merged: Callable[[Tensor], Tensor] | None = getattr(module, "merged", None)  # of an adapted module
    return merged(full) if kind == "weight" and merged is not None else full


class Random:
    """Initial weights for training from scratch, independent of the sharding.

    Weights are normal with the standard deviation in config.json, scales of norms are one, biases and buffers zero. A
    module's `initializers` override this for its parameters.
    """

    def __init__(self, seed: NonNegativeInt):
        self.seed = seed

    def load(self, model: Decoder | HuggingFaceModel) -> None:
        """Initialize `model`. Raises TuneError for models of transformers, each of which has its own initialization."""
        if isinstance(model, HuggingFaceModel):
            raise TuneError(
                "weights: tune.models.hf needs existing weights. To start from random ones, save them with "
                "transformers (AutoModelForCausalLM.from_config(config).save_pretrained(folder)) and train that folder"
            )
        initialize(model, stored_tensors(model), self.seed)


@torch.no_grad()
def initialize(model: Any, names: Iterable[str], seed: int) -> None:
    """Set the named tensors to their initial values, see `Random`."""
    if rehearsal.current():
        return
    for name in names:
        parameter = operator.attrgetter(name)(model)
        shard, where = local_shard(parameter)
        owner, _, kind = name.rpartition(".")
        module = model.get_submodule(owner)
        start = getattr(module, "initializers", {}).get(kind)
        if start is None and (kind == "bias" or not isinstance(parameter, nn.Parameter)):
            shard.zero_()
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            shard.fill_(getattr(module, "initial_weight", 1.0))
        else:
            # Each full parameter has its own generator, so values do not depend on the layout.
            # (torch's CPU generator only reads 32 bits of its seed.)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            empty, spread = torch.empty(parameter.shape), getattr(model.config, "initializer_range", 0.02)
            full = start(empty, generator) if start else empty.normal_(0, spread, generator=generator)
            shard.copy_(full[where])


def check_forward(model: nn.Module, pictures: Pictures | None = None) -> None:
    """Check with a few tokens that a model computes the same with and without its tensor-parallel plan. For models of
    transformers, also check that they can be trained, and how documents can share a row; with `pictures`, the blank
    picture of the data, also that they can be trained on pictures. Raises TuneError otherwise. All processes must call
    this after loading."""
    if pictures is not None and not isinstance(model, HuggingFaceModel):
        raise TuneError(
            f"model: {type(model).__name__} reads only text, and the rows have pictures. For the whole model, set "
            "model._component_=tune.models.hf"
        )
    if rehearsal.current():
        return
    check_plan(model)
    if isinstance(model, HuggingFaceModel):
        model.check(pictures)


def open_checkpoint(
    path: str | Path,
    head: Literal["tokens", "score"] = "tokens",
    setting: str = "model.path",
    adapted: Collection[str] = (),
) -> tuple[Any, Pretrained]:
    """Build the model of a folder, natively or through transformers, on the meta device, and open its weights.

    `adapted` are names of modules that adapters change. A native model of images and text has only its language part:
    if they change other parts, the model is transformers'.

    Raises TuneError, naming `setting`, as `Pretrained` does, and if `head` is "tokens" but the model has scores.
    """
    file = ConfigFile(Path(path), setting)
    if head == "tokens":
        file.require_texts()
    with torch.device("meta"):
        model = build(str(path), head=head)
        ignored = model.names.is_ignored
        if any(ignored(f"{name}.weight") or ignored(f"{name.removeprefix('model.')}.weight") for name in adapted):
            model = hf(path, head=head)
    return model, Pretrained(str(path), model, setting=setting)


def require_same_vocabulary(setting: str, path: str, model: Any, tokenizer: Tokenizer) -> None:
    """Raise TuneError, naming `setting`, if the tokenizer in `path` has other ids than `tokenizer`, or `model` lacks
    rows for some of them."""
    tokenizer.require_same_ids(Tokenizer(path), setting)
    if (rows := model.config.vocab_size) < tokenizer.vocab_size:
        raise TuneError(
            f"{setting}: the model in {path} has rows for {rows} tokens, but the tokenizer has {tokenizer.vocab_size}. "
            "Use a model with a vocab_size of at least that"
        )


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: Dtype = "fp32",
    head: Literal["tokens", "score"] = "tokens",
) -> Decoder:
    """Load the model of a checkpoint folder on one device, for use outside a recipe; with the head `score`, a reward
    model (see `tune.losses.score`). `tune.peft.open_model` also opens adapters and runs. Raises TuneError if the
    checkpoint lacks the score head."""
    model, weights = open_checkpoint(path, head)
    weights.require_complete()
    for parameter in model.parameters():  # buffers keep their dtypes, and values that no checkpoint has
        parameter.data = parameter.data.to(as_dtype(dtype))
    allocate(model, torch.device(device), torch.device(device))
    weights.load(model)
    check_forward(model)
    return model.to(device).eval()
