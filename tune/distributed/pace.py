"""How long this process computes while it trains, without its waits for others: this tells the slowest one.

Counted are forwards and backwards of blocks, and waits for data. FSDP gathers before and reduces after them; what
processes exchange within a block is `waiting`. A GPU's time is that between events on its stream, which are read when a
step has waited for it: so what is sent with the next step's flag (`World.any`) is of the step before.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

NOTABLE = 0.1  # more time than the other processes', from which on the slowest is named


class Pace:
    """The seconds since they were last sent to the others (`own`), and what each process has sent (`of_ranks`)."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.own, self.of_ranks = 0.0, list[float]()
        self.since: Any = None
        self.intervals: deque[tuple[Any, Any]] = deque(maxlen=10_000)  # a script of one's own may never collect them
        self.sent: Iterable[Tensor] = ()

    def start(self) -> None:
        self.since = self._now()

    def stop(self) -> None:
        if self.since is not None:
            self.intervals.append((self.since, self._now()))
        self.since = None

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """What is done within does not count."""
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

    def collect(self, of_ranks: list[float]) -> None:
        """The device has done all that it was given: read the time it took, and keep what others have sent, if any."""
        for start, end in self.intervals:
            self.own += start.elapsed_time(end) / 1e3 if isinstance(start, torch.cuda.Event) else end - start
        self.intervals.clear()
        self.sent = ()
        self.of_ranks = of_ranks if any(of_ranks) else self.of_ranks

    def slowest(self) -> dict[str, float]:
        """Of what was sent last: the process that took most, and which share more than the mean of the others, if it
        is notable."""
        seconds, self.of_ranks = self.of_ranks, []
        if len(seconds) < 2 or not (others := (sum(seconds) - max(seconds)) / (len(seconds) - 1)):
            return {}
        excess = max(seconds) / others - 1
        return {"slowest_rank": seconds.index(max(seconds)), "slowest_excess": excess} if excess > NOTABLE else {}


PACE = Pace()
"""That of this process."""


def waiting() -> AbstractContextManager[None]:
    """A process waits for others within. In what is compiled these waits count."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else PACE.outside()


def count_time(block: nn.Module) -> None:
    """Have PACE count the forward of `block`, if gradients are wanted, and its backward, if it goes through to the
    first operand."""
    forward = block.forward

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

    block.forward = counted
