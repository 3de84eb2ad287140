"""Adapter into base, on disk, a file at a time."""

import shutil
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from tune.checkpointers.disk import disk_tensors
from tune.checkpointers.export import TensorFiles
from tune.errors import TuneError
from tune.models.config_file import ConfigFile
from tune.peft.files import KINDS, WEIGHTS, read_adapter
from tune.peft.lora import LoRA


def merge(base: str | Path, adapter: str | Path, out: str | Path) -> None:
    """Make `out` the model that `base` with `adapter` is: same names and types, adapted weights changed.

    Never holds more than a file of 5 GB in memory. Products are computed in fp32. `out` appears, or is replaced,
    when it is complete.

    Raises:
        TuneError: the adapter has layers, or shapes, that the base has not; the base is quantised.
    """
    source, target = Path(base), Path(out)
    config = ConfigFile(source)
    if config.get("quantization_config"):
        raise TuneError(
            f"{source} has quantised weights, which cannot take an adapter in; give the original checkpoint"
        )
    lora, layers = read_adapter(str(adapter)), _layers(Path(adapter))
    tensors = disk_tensors(source)
    if unknown := [name for name in layers if f"{name}.weight" not in tensors]:
        raise TuneError(f"{adapter} is for another base: {source} has no {', '.join(unknown[:5])}")
    _require_shapes(layers, {name: tensor.shape for name, tensor in tensors.items()})
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    ignore = shutil.ignore_patterns("*.safetensors", "*.index.json", "*.bin", "*.gguf", "*.pth")
    shutil.copytree(source, unfinished, ignore=ignore)
    files = TensorFiles(unfinished)
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        weight = tensor.read()
        files.add(name, _merged(weight, layer, layers[layer], lora) if layer in layers else weight)
    files.close()
    shutil.rmtree(target, ignore_errors=True)
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


def _require_shapes(layers: dict[str, dict[str, Tensor]], shapes: dict[str, list[int]]) -> None:
    for name, parts in layers.items():
        needed = [parts["lora_b"].shape[0], parts["lora_a"].shape[1]]
        if needed != (found := shapes[f"{name}.weight"]):
            raise TuneError(
                f"the adapter is for another base: {name} is for a weight of {needed}, the base has {found}"
            )


def _merged(weight: Tensor, name: str, parts: dict[str, Tensor], lora: LoRA) -> Tensor:
    a, b = parts["lora_a"].float(), parts["lora_b"].float()
    merged = weight.float() + lora.scaling(*lora.at(name)) * b @ a
    if "magnitude" in parts:
        merged *= (parts["magnitude"].float() / merged.norm(dim=1))[:, None]
    return merged.to(weight.dtype)
