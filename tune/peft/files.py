"""Adapters on disk, in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tune.distributed import World, full_tensor, local_shard
from tune.errors import TuneError
from tune.peft.adapters import adapted_modules, disk_module_name
from tune.peft.lora import LoRA
from tune.types import Fraction, PositiveFloat, PositiveInt

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KINDS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


def adapter(
    path: str | None = None,
    rank: PositiveInt = 16,
    alpha: PositiveFloat = 32.0,
    dropout: Fraction = 0.0,
    target_modules: list[str] | str = "all-linear",
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    rank_stabilized: bool = False,
    dora: bool = False,
) -> LoRA:
    """The adapter in the folder `path`, or without one a new adapter as the other arguments say.

    Raises:
        TuneError: both: an adapter that exists has its own rank, targets and kind.
    """
    ranks, alphas = dict(rank_pattern or {}), dict(alpha_pattern or {})
    new = LoRA(rank, alpha, dropout, target_modules, ranks, alphas, rank_stabilized, dora)
    if path is None:
        return new
    existing = read_adapter(path)
    names = [field.name for field in fields(LoRA)]
    clashes = [
        f"{name}={getattr(new, name)!r} (there it is {getattr(existing, name)!r})"
        for name in names
        if getattr(new, name) not in (getattr(LoRA(), name), getattr(existing, name))
    ]
    if clashes:
        raise TuneError(f"adapter.path: {path} decides what adapter it is; leave out {', '.join(clashes)}")
    return existing


def read_adapter(path: str) -> LoRA:
    """What adapter the folder `path` holds.

    Raises:
        TuneError: there is none, or it is of a kind or has an option that is not supported.
    """
    file = Path(path) / CONFIG
    if not file.exists():
        found = ", ".join(sorted(child.name for child in Path(path).glob("*"))[:8]) or "nothing"
        raise TuneError(f"adapter.path: {path} has no {CONFIG}; found {found}")
    settings = json.loads(file.read_text())
    if settings.get("peft_type") != "LORA":
        raise TuneError(f"{file}: peft_type is {settings.get('peft_type')!r}; only LORA is supported")
    unsupported = {
        "bias": "none", "fan_in_fan_out": False, "modules_to_save": None, "layers_to_transform": None,
        "layer_replication": None, "target_parameters": None, "trainable_token_indices": None, "lora_bias": False,
        "use_qalora": False,
    }  # fmt: skip
    for name, supported in unsupported.items():
        if settings.get(name, supported) not in (supported, None, [], {}):
            raise TuneError(f"{file}: {name}={settings[name]!r} is not supported; supported: {supported!r}")
    return LoRA(
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        dropout=settings.get("lora_dropout", 0.0),
        target_modules=settings["target_modules"],
        rank_pattern=settings.get("rank_pattern") or {},
        alpha_pattern=settings.get("alpha_pattern") or {},
        rank_stabilized=settings.get("use_rslora", False),
        dora=settings.get("use_dora", False),
    )


def load_adapter(model: nn.Module, path: str) -> None:
    """Fill the adapters of `model` with those in the folder `path`. Each process reads its own slices.

    Raises:
        TuneError: names or shapes do not fit; all are named.
    """
    file = Path(path) / WEIGHTS
    wanted = {_key(model, name, kind): parameter for name, kind, parameter in _parameters(model)}
    try:
        with safe_open(file, framework="pt") as tensors:
            found = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
            problems = [f"missing: {name}" for name in wanted.keys() - found.keys()]
            problems += [f"not known: {name} {found[name]}" for name in found.keys() - wanted.keys()]
            problems += [
                f"{name} has shape {found[name]}, this model needs {list(parameter.shape)}"
                for name, parameter in wanted.items()
                if name in found and found[name] != list(parameter.shape)
            ]
            if problems:
                raise TuneError(f"adapter.path: {path} is for another model:\n  " + "\n  ".join(sorted(problems)[:12]))
            with torch.no_grad():
                for name, parameter in wanted.items():
                    shard, where = local_shard(parameter)
                    shard.copy_(tensors.get_slice(name)[where])
    except (SafetensorError, OSError) as error:
        raise TuneError(f"adapter.path: {file} cannot be read: {error}") from error


def export_adapter(model: nn.Module, lora: LoRA, folder: Path, world: World, *, base: str, card: str = "") -> None:
    """Write the adapters of `model` such that PEFT, transformers and vLLM load them on top of the model `base`.

    All processes take part. The folder appears when it is complete.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    tensors = {}
    for name, kind, parameter in _parameters(model):
        full = full_tensor(parameter.detach())
        if world.is_main:
            tensors[_key(model, name, kind)] = full.to("cpu", torch.float32).contiguous()
    if world.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        (unfinished / CONFIG).write_text(json.dumps(_config(model, lora, base), indent=2) + "\n")
        (unfinished / "README.md").write_text(card)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    world.barrier()


def _config(model: nn.Module, lora: LoRA, base: str) -> dict[str, Any]:
    layers = {disk_module_name(model, name): layer for name, layer in adapted_modules(model).items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _target_modules(model, set(layers)),
        "rank_pattern": {name: layer.rank for name, layer in layers.items() if layer.rank != lora.rank},
        "alpha_pattern": {name: layer.alpha for name, layer in layers.items() if layer.alpha != lora.alpha},
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _target_modules(model: nn.Module, adapted: set[str]) -> list[str]:
    """The last parts of the names where they say exactly which layers were adapted; otherwise the names in full."""
    kinds = {name.rpartition(".")[2] for name in adapted}
    modules = {disk_module_name(model, name) for name, _ in model.named_modules()}
    matched = {name for name in modules if name.rpartition(".")[2] in kinds}
    return sorted(kinds if matched == adapted else adapted)


def _parameters(model: nn.Module) -> list[tuple[str, str, nn.Parameter]]:
    """(module, kind, parameter) of all adapters."""
    return [
        (name, kind, parameter)
        for name, layer in adapted_modules(model).items()
        for kind in KINDS
        if (parameter := getattr(layer, kind)) is not None
    ]


def _key(model: nn.Module, name: str, kind: str) -> str:
    return f"base_model.model.{disk_module_name(model, name)}.{KINDS[kind]}"
