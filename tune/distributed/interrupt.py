"""SIGINT and SIGTERM as a flag that the training loop reads."""

import contextlib
import os
import signal
import time
from types import FrameType

FORWARDED = 2.0  # seconds in which one Ctrl-C may arrive again, from torchrun
NOTICE = "{}: the run ends when what it is doing now is saved. A second signal ends it at once, and loses that\n"


class Interrupt:
    """From its creation on, SIGINT (Ctrl-C) and SIGTERM no longer end the process: the first one sets `requested`.

    Processes are told at different moments, so the recipe sums `requested` over all of them and stops them at one step.
    A second signal raises KeyboardInterrupt, wherever the process is.
    """

    def __init__(self) -> None:
        self.requested = False
        self.first = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self.first = True, now
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # nobody reads it; print() is not for a handler
                    os.write(2, NOTICE.format(signal.Signals(number).name).encode())
        elif now - self.first > FORWARDED:
            raise KeyboardInterrupt
