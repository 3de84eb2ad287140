"""Several adapters of one base as one, as PEFT's `add_weighted_adapter` makes it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tune.errors import TuneError
from tune.models.names import Names
from tune.peft.adapters import adapted_modules
from tune.peft.files import load_adapter, read_adapter
from tune.peft.lora import LoRALinear

METHODS = ("linear", "ties", "dare_linear", "dare_ties")


@torch.no_grad()
def load_combined(
    model: Any,
    adapters: Sequence[Path],
    method: str,
    weights: Sequence[float] = (),
    density: float = 0.5,
    seed: int = 0,
) -> None:
    """Load into `model`, which has the layers of the first of the `adapters`, what they make together. For each layer,
    its A matrices and its B matrices are summed, times the root of weight and scaling (`linear`).

    `ties` (Yadav et al., 2023) keeps of each matrix only the share `density` of largest values, and of each element the
    mean of those that have the sign of their sum; `dare_linear` and `dare_ties` (Yu et al., 2024) keep a share by
    chance, divided by it. Weights are one by default.

    Raises:
        TuneError: the adapters differ in layers or ranks, or have more than low-rank matrices of linear layers.
    """
    layers: dict[str, Any] = dict(adapted_modules(model))
    if weights and len(weights) != len(adapters):
        raise TuneError(f"there are {len(weights)} weights for {len(adapters)} adapters: give one for each")
    if not 0 < density <= 1:
        raise TuneError(f"a density of {density} is no share: it is above 0 and at most 1")
    weights = weights or [1.0] * len(adapters)
    loaded = []
    for folder in adapters:
        lora = read_adapter(str(folder))
        if lora.dora or lora.modules_to_save or not all(isinstance(layer, LoRALinear) for layer in layers.values()):
            raise TuneError(f"{folder} has more than LoRA's matrices of linear layers: it cannot be one of several")
        load_adapter(model, str(folder))
        alphas = {name: lora.at(*Names.of(model).spellings(name))[1] for name in layers}
        loaded.append(
            {
                name: (layer.lora_a.clone(), layer.lora_b.clone(), lora.scaling(layer.rank, alphas[name]))
                for name, layer in layers.items()
            }
        )
    torch.manual_seed(seed)
    for name, layer in layers.items():
        *both, scales = zip(*(each[name] for each in loaded), strict=True)
        products = [weight * scale for weight, scale in zip(weights, scales, strict=True)]
        roots = torch.tensor([math.sqrt(abs(product)) for product in products])
        signs = torch.tensor([math.copysign(1, product) for product in products])
        for parameter, tensors, factors in zip((layer.lora_a, layer.lora_b), both, (roots * signs, roots), strict=True):
            parameter.copy_(_combined(tensors, factors, method, density))
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
