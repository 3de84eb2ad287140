"""Local shards of parameters."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_shard(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """The local tensor and its place in the full one. A plain tensor is its only shard."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The whole parameter, on every process. A collective: all must call it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
