"""Differentiable collectives on hidden states, for processes that share a model."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tune.distributed.pace import waiting

COLLECTIVES = torch.ops._c10d_functional  # torch 2.13 renames the public ones in `torch.distributed`
How = str | tuple[list[int], list[int]]  # all-to-all: (rows received from each process, rows sent to each process)


class Peers(NamedTuple):
    """The name and size of a group of processes, and the rank of this process in it."""

    group: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Peers":
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def copied(self, tensor: Tensor) -> Tensor:
        """Return `tensor`. Each process then computes a part of the result, so backward sums the gradients."""
        return _Exchanged.apply(tensor, "same", "sum", *self)

    def summed(self, tensor: Tensor) -> Tensor:
        """Sum over processes. All processes then compute the same result, so backward keeps the gradient as it is."""
        return _Exchanged.apply(tensor, "sum", "same", *self)

    def gathered(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all processes along the first dimension. Each process then computes a part of the
        result, so backward sums the gradients and returns to each process the part of its own tensor."""
        return _Exchanged.apply(tensor, "gather", "scatter", *self)

    def scattered(self, tensor: Tensor) -> Tensor:
        """Sum over processes and return this process's part along the first dimension; backward gathers the parts."""
        return _Exchanged.apply(tensor, "scatter", "gather", *self)

    def own(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return this process's part along `dim` of a tensor that all have; backward gathers the parts."""
        return _Exchanged.apply(tensor.movedim(dim, 0), "own", "gather", *self).movedim(0, dim)

    def whole(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the tensors of all processes along `dim`. All processes then compute the same result, so backward
        returns to each its part of the gradient."""
        return _Exchanged.apply(tensor.movedim(dim, 0), "gather", "own", *self).movedim(0, dim)

    def own_tokens(self, hidden: Tensor) -> Tensor:
        """Return this process's part of the tokens of `hidden`: `[rows, seq, dim]` -> `[1, part, dim]`."""
        return self.own(self.padded(hidden))[None]

    def all_tokens(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Gather all tokens `[*shape, dim]` from each process's `part` `[1, part, dim]`, the result of `own_tokens`."""
        return self.whole(part[0])[: shape.numel()].unflatten(0, shape)

    def gathered_tokens(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Like `all_tokens`, if each process then computes a part of the result: see `gathered`."""
        return self.gathered(part[0])[: shape.numel()].unflatten(0, shape)

    def padded(self, hidden: Tensor) -> Tensor:
        """Flatten `[rows, seq, dim]` to `[tokens, dim]`, padded so that all processes get the same number of tokens."""
        return F.pad(hidden.flatten(0, 1), (0, 0, 0, -hidden.shape[:2].numel() % self.size))

    def sent(self, tensor: Tensor, counts: list[int], arriving: list[int]) -> Tensor:
        """All-to-all: send `counts` rows to each process, return the `arriving` rows of each; backward reverses it."""
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
        return tensor.chunk(size)[rank].clone()  # a view would keep the whole tensor alive
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
    """Sum over the processes of the group with this name."""
    return _exchange(tensor, "sum", group, 0, 0)
