"""Pipeline parallelism: the processes of the mesh's axis `pp` have stages, each with some of the blocks.

The first stage also has the embedding, the last one the norm and the head; both have the weight of a tied head. All
processes read the same batches. The forward of a stage receives hidden states from the previous stage, computes its
blocks and sends the result on. The last stage returns the head's output, the others a 0 in its place. Backward
receives and sends the gradients. So a recipe's loop, losses and validation ignore stages; only backwards run later
than forwards, see `Pipeline`.

With P processes, stage s is on process s % P. A process with several stages (`world.pp_virtual`) computes one of them
per forward when a schedule sets its turn. Other forwards, such as validation, compute all stages in order.

`torch.distributed.pipelining` is not used: its stages need tensors of one shape, but batches have documents of any
length. Here each stage has the batch and so knows the shape of its input.
"""

import copy
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tune.distributed.pace import PACE
from tune.distributed.shards import local_shard
from tune.distributed.world import World
from tune.errors import TuneError

M = TypeVar("M")


class Stage:
    """Consecutive blocks of a model that one forward computes. `count` is the number of blocks of the whole model. The
    stages `before` and `after` are on other processes and exchange hidden states in `dtype`."""

    def __init__(
        self, blocks: range, count: int, before: "Link | None" = None, after: "Link | None" = None,
        hidden_size: int = 0, dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        self.blocks, self.before, self.after = blocks, before, after
        self.is_first = blocks.start == 0  # it embeds the tokens
        self.is_last = blocks.stop == count  # it has the norm and the head
        self.hidden_size, self.dtype = hidden_size, dtype
        self.received: Tensor | None = None  # from the last forward; a backward from it covers all received tensors

    @classmethod
    def whole(cls, count: int) -> "Stage":
        """Return the only stage of a model that is not cut."""
        return cls(range(count), count)

    def receive(self, tokens: Tensor) -> Tensor:
        """Receive hidden states `[rows, seq, hidden]` from the previous stage, for `tokens` `[rows, seq]`."""
        self.received = torch.empty(0, device=tokens.device, requires_grad=True)  # so that there is a backward
        return _Received.apply(self.received, self.before, (*tokens.shape, self.hidden_size), self.dtype)

    def send(self, hidden: Tensor) -> Tensor:
        """Send hidden states to the next stage. Returns a scalar 0, whose backward receives their gradients."""
        return _Sent.apply(hidden.to(self.dtype), self.after)


class Stages:
    """The stages of a model that this process computes, in order. Iteration yields the stages of the next forward: all
    of them, or only the one whose `turn` it is."""

    def __init__(self, model: Any, world: World, blocks: list[range], dtype: torch.dtype):
        self.mesh = world.mesh["pp"]
        self.uncut = copy.deepcopy(model)  # on the meta device
        place = self.mesh.get_local_rank()
        links = Link(world, place - 1), Link(world, place + 1)
        self.own = [Stage(each, len(model.blocks), *links, model.config.hidden_size, dtype) for each in blocks]
        self.turn: int | None = None  # set by a schedule, see `Pipeline`

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.own if self.turn is None else [self.own[self.turn]])

    @property
    def received(self) -> Tensor | None:
        """The input of the last forward of the stage whose turn it is."""
        return self.own[self.turn or 0].received


def split_blocks(model: Any, size: int, virtual: int = 1, length: int = 1) -> list[range]:
    """Split the blocks of `model` into stages for `size` processes with `virtual` stages each, balanced for rows of
    `length` tokens.

    Raises:
        TuneError: the model has fewer blocks than stages, or does not declare their costs, or a stage has nothing to
            train, or the model has parameters of no stage.
    """
    if not hasattr(model, "keep_stages"):
        raise TuneError(
            f"parallel.pp: cannot cut {type(model).__name__} into stages; only models of tune.models.build. Set it to 1"
        )
    of_stages = tuple(f"{name}." for name in ("embedding", "blocks", "norm", "head"))
    if others := [name for name, _ in model.named_parameters() if not name.startswith(of_stages)]:
        raise TuneError(
            f"parallel.pp: {others[0]} was added to the model, and no stage has it: only the last stage would train "
            "it. Set it to 1"
        )
    *blocks, head = model.costs(length)
    if len(blocks) < size * virtual:
        each = f" (parallel.pp_virtual={virtual} per process)" if virtual > 1 else ""
        other = ", or lower parallel.pp_virtual (interleaved needs 2 or more)" if virtual > 1 else ""
        raise TuneError(
            f"parallel.pp: {size * virtual} stages{each} cannot share {len(blocks)} blocks. Set parallel.pp to at most "
            f"{max(1, len(blocks) // virtual)}{other}"
        )
    stages = stages_of(blocks, head, size * virtual)
    for kept in stages:
        if not any(each.requires_grad for block in kept for each in model.blocks[block].parameters()):
            raise TuneError(
                f"parallel.pp: blocks {kept.start} to {kept.stop - 1}, one stage, have no trainable parameters. "
                "Set it to 1, or train something in each block"
            )
    return stages


def cut(model: Any, world: World, dtype: torch.dtype) -> None:
    """Delete other processes' blocks from `model`, which is on the meta device. Its stages exchange hidden states in
    `dtype`. Raises TuneError as `split_blocks` does."""
    place, length = world.mesh["pp"].get_local_rank(), world.max_seq_len
    blocks = split_blocks(model, world.num_stages, world.pp_virtual, length)[place :: world.num_stages]
    PACE.scale = work_scale(model.costs(length)[:-1], blocks, world.num_stages)
    model.stages = Stages(model, world, blocks, dtype)
    model.keep_stages(model.stages.own)


def uncut(model: Any) -> Any:
    """Return the whole model, on the meta device, from which a stage was cut; `model` itself if it is whole."""
    return getattr(getattr(model, "stages", None), "uncut", model)


def from_its_stage(model: Any, tensor: Tensor | None) -> Tensor:
    """Broadcast `tensor` from the first stage that has it; other stages pass None. All processes must call this."""
    if not isinstance(stages := getattr(model, "stages", None), Stages):
        return tensor  # type: ignore[return-value]
    group = stages.mesh.get_group()
    kinds: list[Any] = [None] * stages.mesh.size()
    mine = None if tensor is None else {"size": tensor.shape, "dtype": tensor.dtype, "device": tensor.device.type}
    dist.all_gather_object(kinds, mine, group=group)
    source, kind = next((stage, kind) for stage, kind in enumerate(kinds) if kind is not None)
    if tensor is None or stages.mesh.get_local_rank() != source:
        tensor = torch.empty(**kind)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor


def stages_of(blocks: list[float], head: float, size: int) -> list[range]:
    """Split blocks into consecutive stages that minimize the cost of the most expensive stage. The last stage also has
    the head."""
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


def work_scale(blocks: list[float], mine: list[range], processes: int) -> float:
    """Return the mean cost of a process's blocks divided by the cost of this process's blocks (`mine`)."""
    own = sum(blocks[index] for stage in mine for index in stage)
    return sum(blocks) / processes / own


class Pipeline:
    """Schedule forwards and backwards of the stages by `world.pp_schedule`:

    gpipe: all forwards of a step, then all backwards; needs the most memory for activations;
    1f1b: after as many forwards as there are stages after this one, each forward is followed by a backward
        (PipeDream-Flush, Narayanan et al., 2021);
    interleaved: 1f1b with several stages per process (same paper, section 2.2), to wait less;
    zero_bubble: a backward first computes the gradient of a stage's input, which the previous stage waits for. Weight
        gradients are computed later, when the process would wait (ZB-H1, Qi et al., 2023; several stages interleave).

    Without stages, each backward follows its forward.
    """

    def __init__(self, model: Any, world: World):
        self.model, self.group = model, world.mesh["pp"].get_group()
        self.size, self.stage, self.virtual = world.num_stages, world.mesh["pp"].get_local_rank(), world.pp_virtual
        self.schedule, self.splits = world.pp_schedule, world.pp_schedule == "zero_bubble" and self.size > 1
        self.waiting: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}  # losses and inputs of stages
        self.later: deque[Work] = deque()  # gradients of weights
        self.copies: list[Tensor] = []  # weights that the first and last stages both train: a tied head
        if self.size > 1 and model.config.tied_head and self.stage in (0, self.size - 1):
            self.copies = [each for each in model.embedding.parameters() if each.requires_grad]
        self.counted_elsewhere = {*self.copies} if self.stage else set()

    def turns(self, micro_batches: Sequence[M]) -> Iterator[M]:
        """Yield the micro-batches of a step in the order of forwards, each once per stage of this process. A group of
        micro-batches, at least as many as processes, goes through one stage, then through the next."""
        count, turns = len(micro_batches), range(self.virtual)
        rest, number = [*range(count)], max(1, count // self.size)
        groups = [[rest.pop(0) for _ in range(-(-len(rest) // left))] for left in range(number, 0, -1)]
        behind = self.size - 1 - self.stage
        self.ahead: float = behind if self.virtual == 1 else 2 * behind + (self.virtual - 1) * len(groups[0])
        if self.schedule == "gpipe" and self.size > 1:
            self.ahead = math.inf
        order = [(turn, index) for group in groups for turn in turns for index in group]
        self.left = deque((turn, index) for group in groups for turn in reversed(turns) for index in group)
        for number, self.at in enumerate(order, 1):
            self.is_last = number == len(order)
            if self.size > 1:
                self.model.stages.turn = self.at[0]
            yield micro_batches[self.at[1]]
        if self.size > 1:
            self.model.stages.turn = None

    def due(self, loss: Tensor) -> Iterator[tuple["Tensor | Work", bool]]:
        """Yield the losses (or parts of their backward) due after the forward that returned `loss`, each with whether
        it is the step's last."""
        self.waiting[self.at] = loss, self.model.stages.received if self.splits else None
        while len(self.waiting) > (0 if self.is_last else self.ahead):
            loss, received = self.waiting.pop(self.left.popleft())
            yield (loss if received is None else self._split(loss, received)), not (self.left or self.splits)
            while len(self.later) > (self.stage if self.left else 0):
                yield self.later.popleft(), False
        if self.is_last:
            if self.splits:
                yield Work(self._reduce), True
            self._sum_copies()

    def _split(self, loss: Tensor, received: Tensor) -> "Work":
        """Return the backward of `loss` for the stage's input and for norm and head, whose gradients a loss has already
        computed. The backward for weights of blocks is added to `later`."""
        from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight  # slow import

        weights = [each for each in self.model.blocks.parameters() if each.requires_grad]
        others = {each for each in self.model.parameters() if each.requires_grad} - {*weights}

        def of_inputs() -> None:
            _, kept = stage_backward_input([loss], None, [received, *others], iter(weights))
            self.later.append(Work(functools.partial(of_weights, kept)))

        def of_weights(kept: list[dict[str, Any]]) -> None:
            stage_backward_weight(iter(weights), kept)
            self._reduce()  # reduce, or have FSDP accumulate in fp32

        return Work(of_inputs)

    def _reduce(self) -> None:
        """Run FSDP's end-of-backward callback, which a backward for weights does not trigger."""
        if isinstance(self.model, FSDPModule):
            self.model._get_fsdp_state()._root_post_backward_final_callback()

    def norm(self, own: Tensor) -> Tensor:
        """Return the norm of all gradients from the norm of this stage's gradients."""
        square = own.square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def _sum_copies(self) -> None:
        """Add the gradients of `copies` from the other stage that has them."""
        for parameter in self.copies:
            assert parameter.grad is not None
            own, _ = local_shard(parameter.grad)
            other = torch.empty_like(own)
            send = dist.P2POp(dist.isend, own, group=self.group, group_peer=self.size - 1 - self.stage)
            receive = dist.P2POp(dist.irecv, other, group=self.group, group_peer=self.size - 1 - self.stage)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            own += other


@dataclass(frozen=True)
class Work:
    """A part of a loss's backward, in the place of the loss."""

    backward: Callable[[], Any]


class Link:
    """The link to a neighboring process; the first process follows the last. Each direction has its own group, so sends
    in one never wait for the other."""

    def __init__(self, world: World, place: int):
        self.place = place % world.num_stages
        self.hidden, self.gradients = world.links[-2:] if self.place != place else world.links[:2]
        self.most = world.num_stages * world.pp_virtual
        self.sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensor: Tensor, group: Any) -> None:
        """Send without waiting, unless many tensors are in flight."""
        tensor = tensor.contiguous()
        self.sent.append((dist.isend(tensor, group=group, group_dst=self.place), tensor))
        if len(self.sent) > self.most:
            self.sent.popleft()[0].wait()

    def receive(self, group: Any, empty: Tensor) -> Tensor:
        dist.recv(empty, group=group, group_src=self.place)
        return empty


class _Received(torch.autograd.Function):
    """Receives hidden states from the previous stage; backward sends it their gradients."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, link: Link, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.link = link
        return link.receive(link.hidden, start.new_empty(shape, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.link.send(gradient, ctx.link.gradients)
        return (None,) * 4


class _Sent(torch.autograd.Function):
    """Sends hidden states to the next stage and returns 0; backward receives their gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, link: Link) -> Tensor:
        ctx.link, ctx.kind = link, {"size": hidden.shape, "dtype": hidden.dtype, "device": hidden.device}
        link.send(hidden, link.hidden)
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.link.receive(ctx.link.gradients, torch.empty(**ctx.kind)), None
