"""What the user came for: the trained model in Hugging Face layout."""

import json
import shutil
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from tune.checkpointers.weights import disk_names
from tune.distributed import World, full_tensor
from tune.errors import TuneError

SHARD_BYTES = 5 * 10**9
DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}


class SavesItself(Protocol):
    def save(self, folder: Path) -> None: ...


def export(
    model: nn.Module,
    tokenizer: SavesItself,
    folder: Path,
    world: World,
    *,
    source: str,
    dtype: Literal["bf16", "fp32"] | None = None,
    card: str = "",
) -> None:
    """Write `model` to `folder` with the names and config of the checkpoint `source` it was built from.

    `dtype` defaults to the one config.json of the source declares. All processes take part: tensors are gathered one
    by one, and rank 0 never holds more than a file of 5 GB. The folder appears when it is complete.
    """
    fields = json.loads((Path(source) / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in fields else "dtype"
    fields[key] = DTYPE_NAMES[dtype] if dtype else fields.get(key) or "float32"
    target = getattr(torch, fields[key])
    names = disk_names(model)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if world.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    plan = _files({name: parameter.numel() * target.itemsize for name, parameter in model.named_parameters()})
    parameters = dict(model.named_parameters())
    for file, members in plan.items():
        gathered: dict[str, torch.Tensor] = {}
        for name in members:
            tensor = full_tensor(parameters[name].detach())
            if world.is_main:
                gathered |= _on_disk(names[name], tensor.to("cpu", target))
        if world.is_main:
            _save(gathered, unfinished / file)
    if world.is_main:
        if len(plan) > 1:
            size = sum(parameter.numel() for parameter in parameters.values()) * target.itemsize
            on_disk = {name: [each] if isinstance(each, str) else each for name, each in names.items()}
            weight_map = {each: file for file, members in plan.items() for name in members for each in on_disk[name]}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        (unfinished / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        if (Path(source) / "generation_config.json").exists():
            shutil.copyfile(Path(source) / "generation_config.json", unfinished / "generation_config.json")
        (unfinished / "README.md").write_text(card)
        tokenizer.save(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    world.barrier()


def _on_disk(names: str | list[str], tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(names, str):
        return {names: tensor.contiguous()}
    # Cloned: safetensors refuses parts of one memory.
    return {name: part.clone() for name, part in zip(names, tensor.unbind(), strict=True)}


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        shutil.rmtree(file.parent)
        raise TuneError(
            f"the trained model could not be written: {error}. The last checkpoint is complete: make room and run the "
            "same command again, which then only writes the model"
        ) from error


def _files(sizes: dict[str, int]) -> dict[str, list[str]]:
    """Which tensors go into which file, in order, none above SHARD_BYTES unless one tensor is."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def model_card(recipe: str, model_path: str, dataset_path: str) -> str:
    """README.md of an exported model: where it comes from."""
    model, dataset = Path(model_path).name, Path(dataset_path).name
    return (
        f"---\nbase_model: {model}\ntags: [tune]\n---\n\n"
        f"Fine-tuned from `{model}` on `{dataset}` with the recipe `{recipe}` of tune.\n"
        "All settings are in config.yaml, all metrics in metrics.jsonl of the run folder.\n"
    )
