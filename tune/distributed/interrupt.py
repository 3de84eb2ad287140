"""SIGINT and SIGTERM as a flag that the training loop reads."""

import contextlib
import os
import signal
import threading
import time
from types import FrameType

FORWARDED = 2.0  # seconds in which torchrun may forward the same Ctrl-C again
NOTICE = "{}: the run stops after this step and saves a checkpoint. A second signal stops it at once, without saving\n"


class Interrupt:
    """Installs handlers: the first SIGINT (Ctrl-C) or SIGTERM sets `requested`, a second raises KeyboardInterrupt.

    Signals reach the processes at different times, so the recipe combines the flags (`world.any`) and all stop after
    the same step. A launcher whose workers get no signals (Ray's run the recipe in a thread) names a file in
    TUNE_STOP_FILE, and makes it.
    """

    def __init__(self) -> None:
        self.signalled, self.stop = False, os.environ.get("TUNE_STOP_FILE", "")
        self.first = 0.0
        for number in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, self._request)

    @property
    def requested(self) -> bool:
        return self.signalled or bool(self.stop and os.path.exists(self.stop))

    def _request(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signalled:
            self.signalled, self.first = True, now
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # stderr may be closed; print() is not safe in a handler
                    os.write(2, NOTICE.format(signal.Signals(number).name).encode())
        elif now - self.first > FORWARDED:
            raise KeyboardInterrupt
