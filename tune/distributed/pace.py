"""Measure how long each process computes in a step, without waits for other processes, to find the slowest one.

The time includes the forwards and backwards of blocks and waits for data. FSDP communicates outside that time, and
`waiting` excludes exchanges inside a block. Pipeline stages have different numbers of blocks, since one also has the
head; their times are scaled to equal work. On a GPU, time is measured between events on the stream. `World.any` reads
the events that the GPU has passed and sends the sum.
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

NOTABLE = 0.1  # relative excess over the other processes' mean above which the slowest process is reported


class Pace:
    """`of_ranks`: seconds that each process has computed and sent since the last call of `slowest`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.of_ranks: list[float] = []
        self.scale = 1.0  # the mean work of a stage / the work of this process's stages
        self.since: Any = None
        # (start, end, scale); bounded because a user's script may never collect them.
        self.intervals: deque[tuple[Any, Any, float]] = deque(maxlen=10_000)

    def start(self) -> None:
        self.since = self._now()

    def stop(self) -> None:
        if self.since is not None:
            self.intervals.append((self.since, self._now(), self.scale))
        self.since = None

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """A context whose time is not counted."""
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
        """Remove the intervals that the device has finished, and return their seconds."""
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
        """Add the seconds that each rank has sent."""
        so_far = self.of_ranks or [0.0] * len(seconds)
        self.of_ranks = [before + more for before, more in zip(so_far, seconds, strict=True)]

    def slowest(self) -> dict[str, float]:
        """Return the metrics `slowest_rank` and `slowest_excess` (its time divided by the mean of the others, minus 1)
        since the last call; empty if no process is notably slower."""
        seconds, self.of_ranks = self.of_ranks, []
        if len(seconds) < 2 or not (others := (sum(seconds) - max(seconds)) / (len(seconds) - 1)):
            return {}
        excess = max(seconds) / others - 1
        return {"slowest_rank": seconds.index(max(seconds)), "slowest_excess": excess} if excess > NOTABLE else {}


PACE = Pace()
"""The measurement of this process."""


def waiting() -> AbstractContextManager[None]:
    """A context for waits on other processes; its time is not counted. In compiled code it is."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else PACE.outside()


def count_time(block: nn.Module) -> None:
    """Have PACE measure the forward of `block` if gradients are enabled, and its backward if its first argument needs
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
            last.grad_fn.register_prehook(lambda _: PACE.start())  # after FSDP's hook, which gathers
            args[0].register_hook(lambda _: PACE.stop())
        return output

    return counted
