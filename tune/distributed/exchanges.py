"""Collectives on hidden states, for processes that share a model. Each is differentiable."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tune.distributed.pace import waiting

COLLECTIVES = torch.ops._c10d_functional  # those with names of their own in `torch.distributed` are renamed in 2.13
How = str | tuple[list[int], list[int]]  # of rows that are sent: how many arrive from each process, and how many go


class Peers(NamedTuple):
    """A group of processes: its name, its size, and the rank of this process in it."""

    group: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Peers":
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def copied(self, tensor: Tensor) -> Tensor:
        """`tensor` itself. What follows computes a part of the result on each process: backward sums the gradients."""
        return _Exchanged.apply(tensor, "same", "sum", *self)

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over processes. What follows computes the same on each: backward takes the gradient as it is."""
        return _Exchanged.apply(tensor, "sum", "same", *self)

    def gathered(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, joined along the first dimension. What follows computes a part of the result on
        each process: backward sums the gradients, and gives each process those of its own tensor."""
        return _Exchanged.apply(tensor, "gather", "scatter", *self)

    def scattered(self, tensor: Tensor) -> Tensor:
        """This process's part, along the first dimension, of the sum over processes; backward gathers the parts."""
        return _Exchanged.apply(tensor, "scatter", "gather", *self)

    def own(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This process's part, along `dim`, of a tensor that all have; backward gathers the parts."""
        return _Exchanged.apply(tensor.movedim(dim, 0), "own", "gather", *self).movedim(0, dim)

    def whole(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The tensors of all processes, joined along `dim`. What follows computes the same on each process: backward
        gives each its part of the gradient."""
        return _Exchanged.apply(tensor.movedim(dim, 0), "gather", "own", *self).movedim(0, dim)

    def own_tokens(self, hidden: Tensor) -> Tensor:
        """This process's part of the tokens of `hidden`, which all have: `[rows, seq, dim]` -> `[1, part, dim]`."""
        return self.own(self.padded(hidden))[None]

    def all_tokens(self, part: Tensor, shape: torch.Size) -> Tensor:
        """All tokens `[*shape, dim]`, of which each process has a `part` `[1, part, dim]`, as `own_tokens` gives it."""
        return self.whole(part[0])[: shape.numel()].unflatten(0, shape)

    def gathered_tokens(self, part: Tensor, shape: torch.Size) -> Tensor:
        """As `all_tokens`, where what follows computes a part of the result on each process: see `gathered`."""
        return self.gathered(part[0])[: shape.numel()].unflatten(0, shape)

    def padded(self, hidden: Tensor) -> Tensor:
        """`[rows, seq, dim]` -> `[tokens, dim]`, with as many tokens for each process."""
        return F.pad(hidden.flatten(0, 1), (0, 0, 0, -hidden.shape[:2].numel() % self.size))

    def sent(self, tensor: Tensor, counts: list[int], arriving: list[int]) -> Tensor:
        """What all have sent to this process, `arriving` rows each, which sends `counts`; in backward the other way."""
        return _Exchanged.apply(tensor, (arriving, counts), (counts, arriving), *self)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, how: How, back: How, group: str, size: int, rank: int) -> Tensor:
        ctx.back, ctx.peers = back, (group, size, rank)
        return _exchange(tensor, how, group, size, rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradient, ctx.back, *ctx.peers), None, None, None, None, None


def _exchange(tensor: Tensor, how: How, group: str, size: int, rank: int) -> Tensor:
    if how == "same":
        return tensor.view_as(tensor)
    if how == "own":
        return tensor.chunk(size)[rank].clone()  # not a view, which would keep all
    tensor = tensor.contiguous()
    with waiting():
        if isinstance(how, tuple):
            done = COLLECTIVES.all_to_all_single(tensor, *how, group)
        elif how == "sum":
            done = COLLECTIVES.all_reduce(tensor, "sum", group)
        elif how == "gather":
            done = COLLECTIVES.all_gather_into_tensor(tensor, size, group)
        else:
            done = COLLECTIVES.reduce_scatter_tensor(tensor, "sum", size, group)
        return COLLECTIVES.wait_tensor(done)


def summed(tensor: Tensor, group: str) -> Tensor:
    """The sum over the processes of the group with this name."""
    return _exchange(tensor, "sum", group, 0, 0)
