"""Peak memory of a process, and the memory that a run will hold."""

import resource
import sys

import torch
from torch import nn

from tune.distributed import stored_dtype


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process in GiB: allocated on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def planned_memory(model: nn.Module, dtype: str, master_dtype: str, shards: int) -> dict[str, float]:
    """GiB that each of `shards` processes will hold from the first step to the last; `model` may be on meta.

    `optimizer` is that of two states for each trained parameter, as AdamW has them.
    """
    stored: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            stored[parameter] = parameter.numel() * stored_dtype(module, parameter, dtype, master_dtype).itemsize
    weights = sum(stored.values())
    trained = sum(size for parameter, size in stored.items() if parameter.requires_grad)
    sizes = {"weights": weights, "gradients": trained, "optimizer": 2 * trained}
    return {name: size / shards / 2**30 for name, size in sizes.items()}
