"""Pipeline parallelism: the processes of the mesh's axis `pp` are stages, each of which has some of the blocks.

The first stage has the embedding too, the last one the norm and the head, and both the weight of a tied head. All
stages read the same batches. A forward on a stage receives hidden states from the stage before, computes its blocks and
sends what comes out on; on the last stage it gives what the head gives, and on the others a 0 that stands for it. The
backward of either receives and sends the gradients. So the loop of a recipe, its losses and its validation do not know
of stages; only backwards come later than forwards, see `Pipeline`.

`torch.distributed.pipelining` is not used: its stages want micro-batches of one shape, which they take from tensors,
where these are batches of documents of any length. As each stage has the batch, it knows the shape of what it receives.
"""

import copy
import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tune.distributed.shards import local_shard
from tune.distributed.world import World
from tune.errors import TuneError


def cut(model: Any, world: World, dtype: torch.dtype) -> None:
    """Have `model`, on the meta device, be this process's stage, which sends hidden states in `dtype`.

    Raises:
        TuneError: it has fewer blocks than there are stages, or does not say what they cost, or a stage has nothing to
            train.
    """
    size, stage = world.num_stages, world.mesh["pp"].get_local_rank()
    if not hasattr(model, "keep_blocks"):
        raise TuneError(
            f"parallel.pp: {type(model).__name__} cannot be cut into stages; models of tune.models.build can. Set "
            "parallel.pp=1"
        )
    *blocks, head = model.costs()
    if len(blocks) < size:
        raise TuneError(
            f"parallel.pp: {size} stages cannot share {len(blocks)} blocks. Set it to {len(blocks)} or less"
        )
    stages = stages_of(blocks, head, size)
    for kept in stages:
        if not any(each.requires_grad for block in kept for each in model.blocks[block].parameters()):
            raise TuneError(
                f"parallel.pp: of the blocks {kept.start} to {kept.stop - 1}, which are a stage, nothing is trained. "
                "Set it to 1, or train something in each block"
            )
    model.uncut = (copy.deepcopy(model),)  # in a tuple, so that it is no part of the model
    model.stages = world.mesh["pp"]
    model.keep_blocks(stages[stage])
    before, after = Link(world, stage - 1), Link(world, stage + 1)
    forward = model.forward
    if stage > 0:

        def receive(tokens: Tensor) -> Tensor:
            start = torch.empty(0, device=tokens.device, requires_grad=True)  # so that what is received has a gradient
            return _Received.apply(start, before, (*tokens.shape, model.config.hidden_size), dtype)

        model.embed = receive
    if stage < size - 1:
        model.output_operands = lambda hidden: (hidden, None)

        def send(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            return _Sent.apply(hidden.to(dtype), after)

        model.forward = lambda batch, head=None, **others: forward(batch, send, **others)


def uncut(model: Any) -> Any:
    """The model that a stage is cut from, on the meta device; `model` itself if it is whole."""
    return getattr(model, "uncut", (model,))[0]


def from_its_stage(model: Any, tensor: Tensor | None) -> Tensor:
    """The `tensor` of the first stage that has it, for the other stages, which give None. All processes take part."""
    if not hasattr(model, "stages"):
        return tensor  # type: ignore[return-value]
    group = model.stages.get_group()
    kinds: list[Any] = [None] * model.stages.size()
    mine = None if tensor is None else {"size": tensor.shape, "dtype": tensor.dtype, "device": tensor.device.type}
    dist.all_gather_object(kinds, mine, group=group)
    source, kind = next((stage, kind) for stage, kind in enumerate(kinds) if kind is not None)
    if tensor is None or model.stages.get_local_rank() != source:
        tensor = torch.empty(**kind)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor


def stages_of(blocks: list[float], head: float, size: int) -> list[range]:
    """The blocks of each stage: consecutive ones, so that the most that a stage costs is least. The last one has the
    head too."""
    total = list(itertools.accumulate([*blocks, head], initial=0.0))

    @functools.cache
    def best(start: int, count: int) -> tuple[float, tuple[int, ...]]:
        if count == 1:
            return total[-1] - total[start], (start,)
        ways = []
        for end in range(start + 1, len(blocks) - count + 2):
            most, starts = best(end, count - 1)
            ways.append((max(total[end] - total[start], most), (start, *starts)))
        return min(ways)

    starts = best(0, size)[1]
    return [range(*pair) for pair in itertools.pairwise((*starts, len(blocks)))]


class Pipeline:
    """Has the stages take turns, by one of the schedules

    gpipe: all forwards of a step, then all backwards: the most memory for activations;
    1f1b: after as many forwards as there are stages behind this one, a backward follows each (PipeDream-Flush,
        Narayanan et al., 2021).

    Without stages each backward follows its forward.
    """

    def __init__(self, model: Any, world: World, schedule: Literal["gpipe", "1f1b"] = "1f1b"):
        self.model, self.group = model, world.mesh["pp"].get_group()
        self.size, self.stage = world.num_stages, world.mesh["pp"].get_local_rank()
        behind = self.size - 1 - self.stage
        self.ahead: float = behind if schedule == "1f1b" or self.size == 1 else math.inf
        self.waiting: deque[Tensor] = deque()
        self.copies: list[Tensor] = []  # what the first and the last stage both train: the weight of a tied head
        if self.size > 1 and model.config.tied_head and self.stage in (0, self.size - 1):
            self.copies = [each for each in model.embedding.parameters() if each.requires_grad]
        self.counted_elsewhere = {*self.copies} if self.stage else set()

    def due(self, loss: Tensor, is_last: bool) -> Iterator[tuple[Tensor, bool]]:
        """The losses whose backward comes after the forward that gave `loss`, which `is_last` in its step, and whether
        each is the last."""
        self.waiting.append(loss)
        while len(self.waiting) > (0 if is_last else self.ahead):
            loss = self.waiting.popleft()
            ends = is_last and not self.waiting
            if self.size > 1 and isinstance(self.model, FSDPModule):  # its weights stay gathered until then
                self.model.set_is_last_backward(ends)
                self.model.set_reshard_after_backward(ends)
            yield loss, ends
        if is_last:
            self._sum_copies()

    def norm(self, own: Tensor) -> Tensor:
        """The norm of all gradients, from that of those of each stage."""
        square = own.square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def _sum_copies(self) -> None:
        """Add the gradients of `copies` on the other stage that has them."""
        for parameter in self.copies:
            assert parameter.grad is not None
            own, _ = local_shard(parameter.grad)
            other = torch.empty_like(own)
            send = dist.P2POp(dist.isend, own, group=self.group, group_peer=self.size - 1 - self.stage)
            receive = dist.P2POp(dist.irecv, other, group=self.group, group_peer=self.size - 1 - self.stage)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            own += other


class Link:
    """To a neighbouring stage. What is sent in one direction never waits for what comes from the other: each has a
    group of its own."""

    def __init__(self, world: World, stage: int):
        self.stage, self.hidden, self.gradients = stage, world.mesh["pp"].get_group(), world.gradients
        self.most = world.num_stages
        self.sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensor: Tensor, group: Any) -> None:
        """Without waiting, unless much is on its way already."""
        tensor = tensor.contiguous()
        self.sent.append((dist.isend(tensor, group=group, group_dst=self.stage), tensor))
        if len(self.sent) > self.most:
            self.sent.popleft()[0].wait()

    def receive(self, group: Any, empty: Tensor) -> Tensor:
        dist.recv(empty, group=group, group_src=self.stage)
        return empty


class _Received(torch.autograd.Function):
    """Hidden states of the stage before; in backward it is sent their gradients."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, link: Link, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.link = link
        return link.receive(link.hidden, start.new_empty(shape, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.link.send(gradient, ctx.link.gradients)
        return (None,) * 4


class _Sent(torch.autograd.Function):
    """Sends hidden states to the stage after and gives 0; in backward their gradients come from there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, link: Link) -> Tensor:
        ctx.link, ctx.kind = link, {"size": hidden.shape, "dtype": hidden.dtype, "device": hidden.device}
        link.send(hidden, link.hidden)
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.link.receive(ctx.link.gradients, torch.empty(**ctx.kind)), None
