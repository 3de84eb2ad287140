"""Local shards of parameters."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

GROUP = 1024  # norms of rows that are summed at a time
LARGE = 2**21  # elements; above this, a second copy takes too much memory


def local_shard(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return the local tensor and its slices of the full tensor. A plain tensor is its only shard."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole parameter on every process. A collective: all processes must call it."""
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.device.type == "cpu" and parameter.numel() >= LARGE:
        return _by_pieces(parameter)
    return parameter.full_tensor()


def _by_pieces(parameter: DTensor) -> torch.Tensor:
    """Like `DTensor.full_tensor`, with less memory: gloo's all-gather makes an extra copy. Instead, each process
    broadcasts its pieces along one mesh axis after another."""
    own, place = local_shard(parameter)
    full = torch.empty(parameter.shape, dtype=parameter.dtype)
    full[place] = own
    places = [place]
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            continue
        group = parameter.device_mesh.get_group(dim)
        known: list[list[tuple[slice, ...]]] = [[] for _ in range(group.size())]
        dist.all_gather_object(known, places, group=group)
        for source, theirs in enumerate(known):
            for there in theirs:
                piece = full[there].contiguous()
                dist.broadcast(piece, group=group, group_src=source)
                if piece.data_ptr() != full[there].data_ptr():
                    full[there] = piece
        places = [place for theirs in known for place in theirs]
    return full


def layout_of(tensor: torch.Tensor) -> object:
    """Return a key for the sharding of a tensor: equal for tensors with the same sharding, None for plain tensors."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of `tensors` of one layout, in fp32. For shards this is a DTensor with partial sums.

    Rows are summed first, then groups of rows: torch adds numbers sequentially on a CPU, and the error grows with their
    count (0.3% for 28 million, the embedding of a small model, and 0.004% for the norms of its rows)."""
    first = tensors[0]
    shards = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    rows = [torch.linalg.vector_norm(each, dim=-1, dtype=torch.float32) for each in shards]
    rows = [_norms_of_groups(each) for each in rows]
    square = torch.nn.utils.get_total_norm(rows).square()
    if not isinstance(first, DTensor):
        return square
    placements = [each if each.is_replicate() else Partial() for each in first.placements]
    return DTensor.from_local(square, first.device_mesh, placements, run_check=False)


def _norms_of_groups(values: torch.Tensor) -> torch.Tensor:
    """Return the norms of groups of `GROUP` of the `values`."""
    if values.numel() <= GROUP:
        return values
    padded = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % GROUP))
    return torch.linalg.vector_norm(padded.unflatten(0, (-1, GROUP)), dim=-1)


def norm_of_squares(squares: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm from one `sum_of_squares` per layout. A collective: all processes must call it."""
    if not squares:
        return torch.zeros(())
    return torch.stack([full_tensor(each) for each in squares]).sum().sqrt()
