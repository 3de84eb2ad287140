"""Merge adapters into the weights of a model in memory, and combine several adapters as PEFT does."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tune.errors import TuneError
from tune.models import Names, own_name
from tune.peft.adapters import adapted_modules
from tune.peft.files import load_parameters, read_adapter
from tune.peft.lora import LoRA, LoRALinear


@torch.no_grad()
def merge_in_place(model: nn.Module) -> None:
    """Merge the adapters of `model` into its weights in memory, in fp32 and one at a time.

    Adapted modules become plain modules again. No further parameter requires a gradient.

    Raises:
        TuneError: the model has no adapter, or adapted weights are quantized or sharded, which only `export` with the
            original weights as `base`, or `merge` of files, can merge. The model is then unchanged.
    """
    layers: dict[str, Any] = dict(adapted_modules(model))
    if not layers:
        raise TuneError("the model has no adapter to merge")
    for name, layer in layers.items():
        if not isinstance(layer.weight, Tensor):
            raise TuneError(f"{name} is quantized, so a merged weight would be rounded. Merge into the original model")
        if isinstance(layer.weight, DTensor):
            raise TuneError(f"{name} is sharded, so its adapter cannot be removed. Use tune.checkpointers.export")
    for layer in layers.values():
        layer.weight.copy_(layer.merged(layer.weight))
    for layer in layers.values():  # only now: experts share matrices
        layer.remove()
    vars(model).pop("has_dropout", None)


@torch.no_grad()
def take_off(model: nn.Module, changes: dict[str, Tensor]) -> None:
    """Remove the adapters of `model`, and add their changes of the weights to `changes`, by layer.

    Each change is computed from the base's weights, as in PEFT: DoRA's norms depend on them.
    """
    layer: Any
    layers = adapted_modules(model)
    for name, layer in layers.items():
        change = layer.merged(layer.weight).float() - layer.weight.float()
        if name in changes:  # DoRA also scales the rows of earlier changes
            magnitude = getattr(layer, "magnitude", None)
            before = changes[name]
            if magnitude is not None:
                before = before * layer._ratio(magnitude, *layer.factors())[:, None]
            change = change + before
        changes[name] = change
    for layer in layers.values():  # only now: experts share matrices
        layer.remove()


def require_combinable(adapters: Sequence[LoRA]) -> None:
    """Raise TuneError if `adapters` cannot be combined: one has modules trained in full, or several
    trained the row of the same token."""
    if len(adapters) < 2:
        return
    trained: dict[tuple[str, int], str | None] = {}
    for lora in adapters:
        if lora.modules_to_save:
            raise TuneError(
                f"{lora.path} has modules trained in full (modules_to_save: {lora.modules_to_save[-1]}, "
                f"{len(lora.modules_to_save)} in total), so it cannot be combined with other adapters. Use it alone, "
                "or merge it into the base first (`tune merge`)"
            )
        modules = lora.trainable_tokens if isinstance(lora.trainable_tokens, dict) else {}
        rows = {(own_name(module), token): lora.path for module, tokens in modules.items() for token in tokens}
        if both := sorted(trained.keys() & rows.keys()):
            module, token = both[0]
            raise TuneError(
                f"{trained[both[0]]} and {lora.path} cannot be combined, since both trained token {token} in {module}. "
                "Use one of them"
            )
        trained |= rows


def give_memory(model: nn.Module) -> None:
    """Move trained parameters to the CPU; the base stays on the meta device. Shared parameters stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                made.setdefault(parameter, nn.Parameter(torch.empty_like(parameter, device="cpu")))
                setattr(module, name, made[parameter])


@torch.no_grad()
def load_combined(
    model: Any, adapters: list[Path], method: str, weights: Sequence[float] = (), density: float = 0.5, seed: int = 0
) -> None:
    """Combine `adapters` into one, and load it into `model`, which has the layers of the first adapter.

    - `linear` sums the A matrices and the B matrices of each layer, each times the root of weight and scaling.
    - `ties` (Yadav et al., 2023) keeps the share `density` of the largest values of each matrix. Each element is the
      mean of the values that have the sign of their sum.
    - `dare_linear` and `dare_ties` (Yu et al., 2024) keep the share `density` at random, divided by it.

    Weights are 1 by default.

    Raises:
        TuneError: the adapters differ in layers or ranks, or have more than low-rank matrices of linear layers.
    """
    layers: dict[str, Any] = dict(adapted_modules(model))
    if weights and len(weights) != len(adapters):
        raise TuneError(f"found {len(weights)} weights for {len(adapters)} adapters. Give one weight per adapter")
    if not all(map(math.isfinite, weights)):
        raise TuneError(f"the weights {', '.join(map(str, weights))} are not all finite")
    if not 0 < density <= 1:
        raise TuneError(f"density {density} is out of range; it must be above 0 and at most 1")
    factors: dict[str, list[tuple[Tensor, Tensor, float]]] = {name: [] for name in layers}
    for folder, weight in zip(adapters, weights or [1.0] * len(adapters), strict=True):
        lora = read_adapter(str(folder))
        if lora.dora or not all(isinstance(layer, LoRALinear) for layer in layers.values()):
            raise TuneError(f"{folder} has more than LoRA matrices of linear layers, which cannot be combined")
        load_parameters(model, folder)
        for name, layer in layers.items():
            _, alpha = lora.at(*Names.of(model).patterned(name))
            share = weight * lora.scaling(layer.rank, alpha)
            factors[name].append((layer.lora_a.clone(), layer.lora_b.clone(), share))
    torch.manual_seed(seed)
    for name, layer in layers.items():
        all_a, all_b, shares = zip(*factors[name], strict=True)
        roots = torch.tensor([math.sqrt(abs(share)) for share in shares])
        signs = torch.tensor([math.copysign(1, share) for share in shares])
        layer.lora_a.copy_(_combined(all_a, roots * signs, method, density))
        layer.lora_b.copy_(_combined(all_b, roots, method, density))
        layer.scaling = 1.0


def _combined(tensors: Sequence[Tensor], weights: Tensor, method: str, density: float) -> Tensor:
    kept = []
    for tensor in tensors:
        if method.startswith("dare"):
            tensor = tensor * torch.bernoulli(torch.full_like(tensor, density)) / density
        elif method == "ties":
            mask = torch.zeros(tensor.numel())
            mask[tensor.abs().flatten().topk(int(density * tensor.numel())).indices] = 1
            tensor = tensor * mask.view_as(tensor)
        kept.append(tensor)
    stack, weights = torch.stack(kept), weights.view(-1, 1, 1)
    if method.endswith("linear"):
        return (stack * weights).sum(dim=0)
    agrees = stack.sign() == torch.where(stack.sum(dim=0) >= 0, 1, -1)
    return (stack * weights * agrees).sum(dim=0) / agrees.sum(dim=0).clamp(min=1)
