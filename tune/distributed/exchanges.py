"""Collectives of the hidden states of processes that share a model, each with what its backward does."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tune.distributed.pace import waiting

COLLECTIVES = torch.ops._c10d_functional  # those with names of their own in `torch.distributed` are renamed in 2.13


class Peers(NamedTuple):
    """The processes of a group, by its name, and the number of this one."""

    group: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Peers":
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def copied(self, tensor: Tensor) -> Tensor:
        """The same on each process, of which each computes a part; in backward the sum of the gradients."""
        return _Exchanged.apply(tensor, "same", "sum", *self)

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum, of which each process computes the same."""
        return _Exchanged.apply(tensor, "sum", "same", *self)

    def gathered(self, tensor: Tensor) -> Tensor:
        """What all have, along the first dimension, of which each process computes a part."""
        return _Exchanged.apply(tensor, "gather", "scatter", *self)

    def scattered(self, tensor: Tensor) -> Tensor:
        """This process's part of the sum, along the first dimension."""
        return _Exchanged.apply(tensor, "scatter", "gather", *self)

    def own(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This process's part of what all have."""
        return _Exchanged.apply(tensor.movedim(dim, 0), "own", "gather", *self).movedim(0, dim)

    def whole(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """What all have, of which each process computes the same."""
        return _Exchanged.apply(tensor.movedim(dim, 0), "gather", "own", *self).movedim(0, dim)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, how: str, back: str, group: str, size: int, rank: int) -> Tensor:
        ctx.back, ctx.peers = back, (group, size, rank)
        return _exchange(tensor, how, group, size, rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradient, ctx.back, *ctx.peers), None, None, None, None, None


def _exchange(tensor: Tensor, how: str, group: str, size: int, rank: int) -> Tensor:
    if how == "same":
        return tensor.view_as(tensor)
    if how == "own":
        return tensor.chunk(size)[rank].clone()  # not a view, which would keep all
    tensor = tensor.contiguous()
    with waiting():
        if how == "sum":
            done = COLLECTIVES.all_reduce(tensor, "sum", group)
        elif how == "gather":
            done = COLLECTIVES.all_gather_into_tensor(tensor, size, group)
        else:
            done = COLLECTIVES.reduce_scatter_tensor(tensor, "sum", size, group)
        return COLLECTIVES.wait_tensor(done)


def summed(tensor: Tensor, group: str) -> Tensor:
    """The sum over the processes of `group`, by its name."""
    return _exchange(tensor, "sum", group, 0, 0)
