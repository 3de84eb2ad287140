"""Adapter into base, on disk, a file at a time."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tune.checkpointers.weights import tensor_files
from tune.errors import TuneError
from tune.peft.files import CONFIG, KINDS, WEIGHTS, read_adapter
from tune.peft.lora import LoRA


def merge(base: str | Path, adapter: str | Path, out: str | Path) -> None:
    """Write to `out` the model that `base` with `adapter` is: same files, names and types, adapted weights changed.

    Never holds more than one file of the base in memory. Products are computed in fp32.

    Raises:
        TuneError: `out` has files already; the adapter has layers, or shapes, that the base has not.
    """
    source, target = Path(base), Path(out)
    if target.exists() and any(target.iterdir()):
        raise TuneError(f"{target} is not empty; give a folder that does not exist yet")
    lora, layers = read_adapter(str(adapter)), _layers(Path(adapter))
    files = tensor_files(source)
    unknown = [name for name in layers if f"{name}.weight" not in files]
    if unknown:
        raise TuneError(f"{adapter} is for another base: {source} has no {', '.join(unknown[:5])}")
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    ignore = shutil.ignore_patterns("*.safetensors", "*.bin", "*.gguf", "*.pth")
    shutil.copytree(source, unfinished, ignore=ignore)
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as tensors:
            metadata = tensors.metadata()
            merged = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        for name, parts in layers.items():
            if f"{name}.weight" in merged:
                merged[f"{name}.weight"] = _merged(merged[f"{name}.weight"], name, parts, lora)
        save_file(merged, unfinished / file.name, metadata=metadata)
    if target.exists():
        target.rmdir()
    unfinished.rename(target)


def _layers(adapter: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of each adapted layer, by the layer's name in the checkpoint."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(adapter / WEIGHTS).items():
        for kind, ending in KINDS.items():
            if key.endswith(f".{ending}"):
                layers.setdefault(key.removeprefix("base_model.model.").removesuffix(f".{ending}"), {})[kind] = tensor
                break
        else:
            raise TuneError(f"{adapter / WEIGHTS}: tensor {key} is of no known kind")
    return layers


def _merged(weight: Tensor, name: str, parts: dict[str, Tensor], lora: LoRA) -> Tensor:
    a, b = parts["lora_a"].float(), parts["lora_b"].float()
    if weight.shape != (b.shape[0], a.shape[1]):
        raise TuneError(f"{name}: the adapter is for a weight of {[b.shape[0], a.shape[1]]}, the base has {list(weight.shape)}")
    merged = weight.float() + lora.scaling(*lora.at(name)) * b @ a
    if "magnitude" in parts:
        merged *= (parts["magnitude"].float() / merged.norm(dim=1))[:, None]
    return merged.to(weight.dtype)
