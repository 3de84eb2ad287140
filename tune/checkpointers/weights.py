"""The weights a training starts from, put into a model whose shards lie anywhere."""

import json
import operator
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tune.distributed import local_shard
from tune.errors import TuneError
from tune.models import Decoder, build
from tune.quantization import NF4Weight

INDEX = "model.safetensors.index.json"


class Pretrained:
    """The *.safetensors of a Hugging Face checkpoint folder, for `model`.

    Names and shapes are compared when this is made, on the meta device too, and nothing is read before `fill`. The
    model's `disk_names` say how its parameters are called on disk; without them the names are the same. Where they give
    a list, the parameter is the stack of those tensors along a new first dimension.

    Raises:
        TuneError: files that are absent or unreadable; tensors missing, not known or of another shape, all named.
    """

    def __init__(self, path: str, model: nn.Module):
        self.files = tensor_files(Path(path))
        self.names = disk_names(model)
        wanted: dict[str, list[int]] = {}
        for name, on_disk in self.names.items():
            shape = list(model.get_parameter(name).shape)
            wanted |= {on_disk: shape} if isinstance(on_disk, str) else dict.fromkeys(on_disk, shape[1:])
        ignored = getattr(model, "not_weights", ())
        found = tensor_shapes(self.files)
        problems = [f"missing: {name} {shape}" for name, shape in wanted.items() if name not in found]
        problems += [
            f"not known: {name} {found[name]}" for name in found.keys() - wanted.keys() if not name.endswith(ignored)
        ]
        problems += [
            f"{name} has shape {found[name]}, config.json says {shape}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ]
        if problems:
            more = f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
            raise TuneError(
                f"model.path: the tensors in {path} do not fit its config.json:\n  " + "\n  ".join(problems[:12]) + more
            )

    def fill(self, model: nn.Module) -> None:
        """Copy each process's own slices into `model`, converting to its types. What it got since is left alone."""
        with torch.no_grad():
            for name, on_disk in self.names.items():
                target = operator.attrgetter(name)(model)
                if isinstance(target, NF4Weight):
                    assert isinstance(on_disk, str)  # only linear layers are quantised
                    target.fill(self._read(on_disk, (target.held_rows(),)))
                    continue
                shard, where = local_shard(target)
                if isinstance(on_disk, str):
                    shard.copy_(self._read(on_disk, where))
                else:
                    for part, disk_name in zip(shard, on_disk[where[0]], strict=True):
                        part.copy_(self._read(disk_name, where[1:]))

    def _read(self, disk_name: str, where: tuple[slice, ...]) -> torch.Tensor:
        # Opened anew for each tensor: a file that stays open keeps all its pages that were read in memory.
        with safe_open(self.files[disk_name], framework="pt") as tensors:
            return tensors.get_slice(disk_name)[where]


def disk_names(model: nn.Module) -> dict[str, str | list[str]]:
    """How a checkpoint names each parameter of `model`, or the tensors that a parameter is the stack of."""
    return getattr(model, "disk_names", {name: name for name, _ in model.named_parameters()})


class Random:
    """Initial weights for training from scratch: those of one device, however the model is sharded.

    Weights are normal with the standard deviation that config.json names, norms scale by one, biases are zero.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def fill(self, model: Decoder) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                shard, where = local_shard(parameter)
                if name.endswith("bias"):
                    shard.zero_()
                elif isinstance(module := model.get_submodule(name.rpartition(".")[0]), nn.RMSNorm | nn.LayerNorm):
                    shard.fill_(getattr(module, "initial_weight", 1.0))
                else:
                    # One full parameter at a time, from a generator of its own, so that no layout changes a number.
                    # (torch's CPU generator reads no more than 32 bits of its seed.)
                    generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
                    full = torch.empty(parameter.shape).normal_(0, model.config.initializer_range, generator=generator)
                    shard.copy_(full[where])


def load_model(path: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """A checkpoint folder as a whole model on one device, outside of any recipe."""
    with torch.device("meta"):
        model = build(path)
    weights = Pretrained(path, model)
    model.to(dtype).to_empty(device=device)
    weights.fill(model)
    return model.eval()


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> its file."""
    if (folder / INDEX).exists():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise TuneError(f"{folder / INDEX} is not a valid index of tensors: {error!r}") from error
        missing = sorted({file for file in weight_map.values() if not (folder / file).exists()})
        if missing:
            raise TuneError(
                f"model.path: {INDEX} names files that are not in {folder}: {', '.join(missing)}. Download them again"
            )
        return {name: folder / file for name, file in weight_map.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(child.name for child in folder.glob("*") if child.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = (
            f"; found {', '.join(others)}: convert them to safetensors (a .gguf with `tune import-gguf`)"
            if others
            else ""
        )
        raise TuneError(
            f"model.path: no *.safetensors in {folder}{hint}. To train from random weights set from_scratch=true"
        )
    return {name: file for file in files for name in tensor_shapes({"": file})}


def tensor_shapes(files: dict[str, Path]) -> dict[str, list[int]]:
    """The shape of every tensor in `files`, from their headers."""
    shapes = {}
    for file in sorted(set(files.values())):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes.update({name: tensors.get_slice(name).get_shape() for name in tensors.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise TuneError(
                f"model.path: {file} is damaged or not a safetensors file ({error}). Download it again"
            ) from error
    return shapes
