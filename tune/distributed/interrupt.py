"""SIGINT and SIGTERM as a flag that the training loop reads."""

import contextlib
import os
import signal
import time
from types import FrameType

FORWARDED = 2.0  # seconds in which torchrun may forward the same Ctrl-C again
NOTICE = "{}: the run stops after this step and saves a checkpoint. A second signal stops it at once, without saving\n"


class Interrupt:
    """Installs handlers: the first SIGINT (Ctrl-C) or SIGTERM sets `requested`, a second raises KeyboardInterrupt.

    Signals reach the processes at different times, so the recipe combines the flags (`world.any`) and all stop after
    the same step.
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
                with contextlib.suppress(OSError):  # stderr may be closed; print() is not safe in a handler
                    os.write(2, NOTICE.format(signal.Signals(number).name).encode())
        elif now - self.first > FORWARDED:
            raise KeyboardInterrupt
