"""Floating-point operations of a model, for model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B)."""

import torch
from torch import Tensor, nn

from tune.devices import named
from tune.models import Decoder, weight_flops


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOPs per second of the device in bf16, None if it is not known."""
    known = named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.tflops * 1e12 if known else None


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Floating-point operations of forward and backward for a token in a document of `seq_len`, recomputation left out.

    Those of `weight_flops`, without the embedding unless it is the head; 6 for each pair of tokens and each dimension
    of queries and values, as if attention was not causal, within the window; of transformers' models those of
    attentions that end with an `nn.Linear`. What recurrent layers do beside their weights is left out.
    """
    lookups = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    if getattr(model, "head", None) is None and lookups:
        lookups.remove(max(lookups, key=Tensor.numel))
    return weight_flops(model, lookups) + 6 * _pair_widths(model, seq_len)


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
