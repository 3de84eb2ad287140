"""Giving a model adapters: which layers, and what of the model is trained then."""

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn

from tune.distributed import full_tensor, local_shard
from tune.errors import TuneError
from tune.peft.lora import LoRA, LoRALinear
from tune.quantization import NF4Weight, dequantize


@dataclass(frozen=True)
class Adapted:
    """What `add_adapters` did: the adapted layers by their names in the model, and parameter counts."""

    layers: dict[str, LoRALinear]
    trainable: int
    total: int

    def table(self) -> str:
        """A line for each kind of layer."""
        kinds: dict[str, list[LoRALinear]] = {}
        for name, layer in self.layers.items():
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(layer)
        lines = [
            f"adapters: {self.trainable:,} of {self.total:,} parameters are trained ({self.trainable / self.total:.2%})"
        ]
        width = max(map(len, kinds)) + 2
        for kind, layers in kinds.items():
            ranks = ", ".join(map(str, sorted({layer.rank for layer in layers})))
            lines.append(f"  {kind:<{width}}x {len(layers):<4} rank {ranks}")
        return "\n".join(lines)


def add_adapters(model: nn.Module, lora: LoRA) -> Adapted:
    """Freeze `model`, any module, and give the linear layers that `lora` targets an adapter, in place.

    On the meta device the adapters have undefined weights until `initialize`; elsewhere they get them here, and the
    model computes what it computed before.

    Raises:
        TuneError: nothing matches, or what matches cannot be adapted.
    """
    targets = _targets(model, lora)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, layer in targets.items():
        rank, alpha = lora.at(*_names(model, name))
        if rank > (smallest := min(layer.in_features, layer.out_features)):
            raise TuneError(f"adapter.rank: {rank} is more than {name} has dimensions ({smallest}); lower it")
        LoRALinear.adapt(layer, name, rank, alpha, lora)
    if not next(model.parameters()).is_meta:
        initialize(model, seed=0)
    parameters = list(model.parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return Adapted(adapted_modules(model), trainable, sum(parameter.numel() for parameter in parameters))


def adapted_modules(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def disk_module_name(model: nn.Module, name: str) -> str:
    """How a checkpoint calls the module `name`: PEFT files, and most users, name it so."""
    return getattr(model, "disk_names", {}).get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")


def initialize(model: nn.Module, seed: int) -> None:
    """Weights of new adapters, the same on any layout: A uniform as in `nn.Linear`, B zero, magnitudes the base's."""
    with torch.no_grad():
        for name, layer in adapted_modules(model).items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            bound = 1 / math.sqrt(layer.in_features)
            _fill(layer.lora_a, torch.empty(layer.lora_a.shape).uniform_(-bound, bound, generator=generator))
            _fill(layer.lora_b, torch.zeros(layer.lora_b.shape))
            if layer.magnitude is not None:
                _fill(layer.magnitude, _full_weight(layer).norm(dim=1))


def _full_weight(layer: LoRALinear) -> torch.Tensor:
    if not isinstance(layer.weight, NF4Weight):
        return full_tensor(layer.weight).float()
    codes, scales, ranges = layer.weight.codes, layer.weight.scales, layer.weight.ranges
    full_ranges = None if ranges is None else full_tensor(ranges)
    return dequantize(full_tensor(codes), full_tensor(scales), full_ranges, torch.float32)


def _fill(parameter: nn.Parameter, full: torch.Tensor) -> None:
    shard, where = local_shard(parameter)
    shard.copy_(full[where])


def _targets(model: nn.Module, lora: LoRA) -> dict[str, nn.Linear]:
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    heads = {name for name in linears if "." not in name}  # the output projection stands at the top of a model
    wanted = lora.target_modules
    if wanted == "all-linear":
        chosen = [name for name in linears if name not in heads]
    elif isinstance(wanted, str):
        chosen = [name for name in linears if any(re.fullmatch(wanted, known) for known in _names(model, name))]
    else:
        chosen = [name for name in linears if any(_ends_with(known, wanted) for known in _names(model, name))]
        unmatched = [
            each for each in wanted if not any(_ends_with(k, [each]) for n in linears for k in _names(model, n))
        ]
        if unmatched:
            raise _no_match(model, unmatched[0], linears)
    if not chosen:
        raise _no_match(model, str(wanted), linears)
    if refused := heads & set(chosen):
        raise TuneError(
            f"adapter.target_modules: {', '.join(refused)} is the output head, which is not adapted; leave it out"
        )
    return {name: linears[name] for name in chosen}


def _names(model: nn.Module, name: str) -> tuple[str, str]:
    return name, disk_module_name(model, name)


def _ends_with(name: str, endings: list[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _no_match(model: nn.Module, wanted: str, linears: Mapping[str, nn.Linear]) -> TuneError:
    modules = [known for name, _ in model.named_modules() for known in _names(model, name)]
    others = [name for name in modules if _ends_with(name, [wanted])]
    if others:
        return TuneError(
            f"adapter.target_modules: '{wanted}' is {others[0]}, which is not a linear layer; only those are adapted"
        )
    known = sorted({name.rpartition(".")[2] for linear in linears for name in _names(model, linear)})
    close = get_close_matches(wanted, known, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return TuneError(
        f"adapter.target_modules: '{wanted}' matches no layer.{hint} The linear layers are {', '.join(known)}"
    )
