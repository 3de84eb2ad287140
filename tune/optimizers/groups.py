"""Parameter groups for an optimizer, and the learning rates to log."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tune.distributed import uncut
from tune.errors import TuneError, explained
from tune.types import Rate, Ratio


def parameter_groups(
    model: nn.Module, lr: Rate, *, decay_vectors: bool = False, lr_ratios: Mapping[str, Ratio] | None = None
) -> list[dict[str, Any]]:
    """Group the trained parameters of `model` for an optimizer with learning rate `lr`.

    Matrices and stacks of matrices get weight decay, embeddings and heads too. Norms and biases get none, whatever
    their shape (the biases of experts are a matrix), unless `decay_vectors`. `lr_ratios` maps a pattern to a factor on
    `lr` for parameters whose name matches: {"lora_b": 16} is LoRA+ (Hayou et al., 2024). Their group has the pattern as
    `name`. Groups of matrices or stacks of matrices in repeated blocks are marked `in_blocks`, for Muon.

    Raises:
        TuneError: a pattern is invalid or matches no name, or a rate is above 100.
    """
    ratios = {str(pattern): ratio for pattern, ratio in (lr_ratios or {}).items()}
    for pattern, ratio in ratios.items():
        with explained(f"parameter_groups.lr_ratios: '{pattern}' is not a regular expression", re.error):
            re.compile(pattern)
        if lr * ratio > 100:
            raise TuneError(
                f"parameter_groups.lr_ratios: optimizer.lr={lr} times {ratio} ('{pattern}') is a learning rate above "
                "100. Lower one of them"
            )
    here, model = dict(model.named_parameters()), uncut(model)  # all stages must have the same groups
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for pattern in ratios:
        if not any(re.search(pattern, name) for name in trained):
            raise TuneError(
                f"parameter_groups.lr_ratios: '{pattern}' matches no trained parameter. Names look like "
                f"{', '.join(sorted({re.sub(r'[0-9]+', '*', name) for name in trained})[:12])}"
            )
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = {parameter for blocks in lists for parameter in blocks.parameters()}
    groups: dict[tuple[str, bool, bool], dict[str, Any]] = {}
    for name, parameter in trained.items():
        pattern = next((pattern for pattern in ratios if re.search(pattern, name)), "")
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__.lower()
        is_norm = "norm" in owner  # Cohere's norms have a row per head
        is_weight = parameter.ndim > 1 and not is_norm and not name.endswith("bias")
        is_convolution = "conv" in owner or "conv" in name.rpartition(".")[2]  # not a matrix for Muon to orthogonalize
        decayed = decay_vectors or is_weight
        in_blocks = is_weight and parameter in blocks and not is_convolution
        group = groups.setdefault((pattern, decayed, in_blocks), {"params": [], "in_blocks": in_blocks})
        group["params"] += [here[name]] if name in here else []
        if pattern:
            group |= {"lr": lr * ratios[pattern], "name": pattern}
        if not decayed:
            group["weight_decay"] = 0.0
    return list(groups.values())


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return the metrics `lr`, and `lr/NAME` for each named group (a number if an unnamed group's rate differs)."""
    rates: dict[str, float] = {}
    for index, group in enumerate(optimizer.param_groups):
        rate, name = float(group["lr"]), group.get("name")
        key = f"lr/{name}" if name else "lr"
        rates[key if rates.get(key, rate) == rate else f"lr/{index}"] = rate
    return {"lr": next(iter(rates.values()))} | rates
