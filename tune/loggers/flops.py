"""Floating-point operations of a model, for model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B)."""

from typing import Any

import torch
from torch import nn

from tune.devices import named
from tune.models.decoder import Decoder
from tune.quantization import NF4Weight


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOPs per second of the device in bf16, None if it is not known."""
    known = named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.tflops * 1e12 if known else None


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Floating-point operations of forward and backward for a token in a document of `seq_len`, recomputation left out.

    6 for each trained weight (2 forward, 4 backward) and 4 for each frozen one (no gradient of its own), without the
    embedding unless it is the head; 6 for each pair of tokens and each dimension of queries and values, as if attention
    was not causal, within the window; of transformers' models those of attentions that end with an `nn.Linear`. Of
    experts those count that a token is sent to. What recurrent layers do beside their weights is left out.
    """
    lookups = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    if getattr(model, "head", None) is None and lookups:
        lookups.pop(max(lookups, key=lambda key: lookups[key].numel()))
    total = 0.0
    for name, module in model.named_modules():
        if isinstance(module, NF4Weight):  # two weights a byte
            total += 4 * 2 * module.codes.numel()
            continue
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in lookups:
                share = _activated_share(model, name, parameter.ndim)
                total += (6 if parameter.requires_grad else 4) * parameter.numel() * share
    return total + 6 * _pair_widths(model, seq_len)


def _activated_share(model: nn.Module, name: str, dimensions: int) -> float:
    """The share of a module's weights that a token uses: below 1 for experts, whose weights are stacked."""
    module = model.get_submodule(name)
    config: Any = getattr(model, "config", None)
    if isinstance(model, Decoder) or dimensions < 3 or "experts" not in name:
        return getattr(module, "activated_share", 1.0)
    return config.num_experts_per_tok / next(module.parameters()).shape[0]


def _pair_widths(model: nn.Module, seq_len: int) -> float:
    """Dimensions of queries and of values, times the tokens that one attends to, summed over layers."""
    if isinstance(model, Decoder):
        attentions = [layer.attention for layer in model.config.layers]
        return sum(each.pair_width * min(seq_len, getattr(each, "window", None) or seq_len) for each in attentions)
    total = 0.0
    for module in model.modules():  # of transformers: the last projection is that of the output
        projections = [each for each in module.children() if isinstance(each, nn.Linear)]
        if projections and type(module).__name__.endswith("Attention"):
            total += 2 * projections[-1].in_features * min(seq_len, getattr(module, "sliding_window", None) or seq_len)
    return total
