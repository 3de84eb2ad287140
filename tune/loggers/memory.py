"""Memory of a process: the most it has had, and what it will hold."""

import resource
import sys

import torch
from torch import nn

BYTES = {"bf16": 2, "fp32": 4}


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has had: allocated on its GPU, or resident on the host. GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def planned_memory(model: nn.Module, dtype: str, master_dtype: str, shards: int) -> dict[str, float]:
    """What each of `shards` processes will hold from the first step to the last, before any of it exists. GiB.

    `optimizer` is that of two states for each trained parameter, as AdamW has them.
    """
    weights = trained = 0
    for parameter in model.parameters():
        kind = master_dtype if parameter.requires_grad else dtype
        weights += parameter.numel() * (BYTES[kind] if parameter.is_floating_point() else parameter.itemsize)
        trained += parameter.numel() * BYTES[master_dtype] if parameter.requires_grad else 0
    sizes = {"weights": weights, "gradients": trained, "optimizer": 2 * trained}
    return {name: size / shards / 2**30 for name, size in sizes.items()}
