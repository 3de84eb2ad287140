"""How long each process computes in a step, without its waits for other processes: this tells which is the slowest.

The forwards and backwards of blocks count, and the waits for data. FSDP communicates before and after them,
outside of the measured time; what processes exchange inside a block is taken out by `waiting`. Stages of a
pipeline have other numbers of blocks, as one has the head too: their times are scaled to those of the same
work. On a GPU, time is measured between events on its stream. `World.any` reads those that the GPU has passed, and
sends the sum.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tune.distributed.wrapping import Forward, Wrap, wrap

NOTABLE = 0.1  # more time than the other processes', from which on the slowest is named


class Pace:
    """`of_ranks` are the seconds that each process has computed and sent, since `slowest` was asked last."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.of_ranks: list[float] = []
        self.scale = 1.0  # of the time of this process's blocks: a mean stage's work over the work that it has
        self.since: Any = None
        # Start, end and scale of each; a script of one's own may never collect them.
        self.intervals: deque[tuple[Any, Any, float]] = deque(maxlen=10_000)

    def start(self) -> None:
        self.since = self._now()

    def stop(self) -> None:
        if self.since is not None:
            self.intervals.append((self.since, self._now(), self.scale))
        self.since = None

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """The time inside does not count."""
        counts = self.since is not None
        self.stop()
        yield
        if counts:
            self.start()

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> float:
        """The seconds of the intervals that the device has finished; they are not measured again."""
        seconds, unfinished = 0.0, []
        for start, end, scale in self.intervals:
            if not isinstance(end, torch.cuda.Event):
                seconds += scale * (end - start)
            elif end.query():
                seconds += scale * start.elapsed_time(end) / 1e3
            else:
                unfinished.append((start, end, scale))
        self.intervals = deque(unfinished, maxlen=self.intervals.maxlen)
        return seconds

    def add(self, seconds: list[float]) -> None:
        """Add what each rank has sent."""
        so_far = self.of_ranks or [0.0] * len(seconds)
        self.of_ranks = [before + more for before, more in zip(so_far, seconds, strict=True)]

    def slowest(self) -> dict[str, float]:
        """The metrics `slowest_rank` and `slowest_excess` (its time divided by the mean of the others, minus 1) of what
        was sent last; none if no process is notably slower."""
        seconds, self.of_ranks = self.of_ranks, []
        if len(seconds) < 2 or not (others := (sum(seconds) - max(seconds)) / (len(seconds) - 1)):
            return {}
        excess = max(seconds) / others - 1
        return {"slowest_rank": seconds.index(max(seconds)), "slowest_excess": excess} if excess > NOTABLE else {}


PACE = Pace()
"""The measurement of this process."""


def waiting() -> AbstractContextManager[None]:
    """Around a wait for other processes, whose time does not count. In compiled code it counts."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else PACE.outside()


def count_time(block: nn.Module) -> None:
    """Have PACE measure the forward of `block`, if gradients are enabled, and its backward, if its first operand needs
    a gradient."""
    wrap(block, Wrap.TIMING, _counted)


def _counted(forward: Forward) -> Forward:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        PACE.start()
        output = forward(*args, **kwargs)
        PACE.stop()
        last = output[0] if isinstance(output, tuple) else output
        if args and isinstance(args[0], Tensor) and args[0].requires_grad and isinstance(last, Tensor) and last.grad_fn:
            last.grad_fn.register_prehook(lambda _: PACE.start())  # after FSDP's hook, in which it gathers
            args[0].register_hook(lambda _: PACE.stop())
        return output

    return counted
