"""SIGINT and SIGTERM as a flag that the training loop reads."""

import contextlib
import os
import signal
import threading
import time
from types import FrameType

FORWARDED = 2.0  # seconds in which torchrun may forward the same Ctrl-C again
NOTICE = "{}: the run stops after this step and saves a checkpoint. A second signal stops it at once, without saving\n"
AT_ONCE = "{}: the run stops now. Its training is saved, and the same command writes the result\n"


class Interrupt:
    """Installs handlers: the first SIGINT (Ctrl-C) or SIGTERM sets `requested`, a second raises KeyboardInterrupt, and
    after `end` the first one.

    Signals reach the processes at different times, so the run combines the flags (`world.any`) and all stop after
    the same step. A launcher whose workers get no signals (Ray's run the recipe in a thread) names a file in
    TUNE_STOP_FILE, and makes it.
    """

    def __init__(self) -> None:
        self.signalled, self.stop = False, os.environ.get("TUNE_STOP_FILE", "")
        self.first = 0.0
        self.has_ended = False
        for number in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, self._request)

    @property
    def requested(self) -> bool:
        return self.signalled or bool(self.stop and os.path.exists(self.stop))

    def _request(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first = not self.signalled
        if is_first:
            self.signalled, self.first = True, now
            notice = AT_ONCE if self.has_ended else NOTICE
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # stderr may be closed; print() is not safe in a handler
                    os.write(2, notice.format(signal.Signals(number).name).encode())
        if self.has_ended if is_first else now - self.first > FORWARDED:
            raise KeyboardInterrupt

    def end(self) -> bool:
        """The training is over, and nobody looks at `requested` again: a signal from here on raises KeyboardInterrupt.
        Returns whether one came before."""
        self.has_ended = True
        return self.requested
