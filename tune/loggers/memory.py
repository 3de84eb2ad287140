import resource
import sys

import torch


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has had: allocated on its GPU, or resident on the host. GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
