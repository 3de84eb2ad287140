"""Floating-point operations of a model, for model FLOPs utilization (Chowdhery et al., PaLM, 2022, appendix B)."""

import torch
from torch import Tensor, nn

from tune.devices import named
from tune.models import Decoder, weight_flops
from tune.parts import language_of, part_of


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak FLOPs per second in bf16, or None if unknown."""
    known = named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.fastest * 1e12 if known else None


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Return forward and backward FLOPs per token in a document of `seq_len` tokens, without recomputation.

    They include `weight_flops`, without the embedding unless it is also the head. Attention counts 6 for each pair of
    tokens and each dimension of queries and values, as if not causal, within the window. In transformers models, only
    attentions that end with an `nn.Linear` count. Recurrent layers count only their weights. Of a model of images and
    text, the language part counts: a picture's patches are not tokens.
    """
    language = language_of(model)
    lookups: set[Tensor] = {module.weight for module in language.modules() if isinstance(module, nn.Embedding)}
    if getattr(model, "head", None) is None and lookups:
        lookups.remove(max(lookups, key=Tensor.numel))
    others = {parameter for name, parameter in model.named_parameters() if part_of(model, name) != "language"}
    return weight_flops(model, lookups | others) + 6 * _pair_widths(language, seq_len)


def _pair_widths(model: nn.Module, seq_len: int) -> float:
    """Return the dimensions of queries and values times the attended tokens, summed over layers."""
    if isinstance(model, Decoder):
        attentions = [layer.attention for layer in model.config.layers]
        return sum(each.pair_width * min(seq_len, getattr(each, "window", None) or seq_len) for each in attentions)
    total = 0.0
    for module in model.modules():  # in transformers, the last projection is the output projection
        projections = [each for each in module.children() if isinstance(each, nn.Linear)]
        if projections and type(module).__name__.endswith("Attention"):
            total += 2 * projections[-1].in_features * min(seq_len, getattr(module, "sliding_window", None) or seq_len)
    return total
