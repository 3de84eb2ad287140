"""Turn SIGINT and SIGTERM into a flag that the training loop reads."""

import contextlib
import os
import signal
import threading
import time
from types import FrameType

FORWARDED = 2.0  # seconds within which torchrun may forward the same Ctrl-C again
NOTICE = "{}: stopping after this step; a checkpoint will be saved. A second signal stops at once without saving\n"
AT_ONCE = "{}: stopping now. The training is saved; run the same command again to write the result\n"


class Interrupt:
    """Install signal handlers: the first SIGINT (Ctrl-C) or SIGTERM sets `requested`, a second raises
    KeyboardInterrupt. After `end`, the first one raises it.

    Signals reach the processes at different times, so the run combines the flags (`world.any`), and all processes stop
    after the same step. Workers of Ray run the recipe in a thread and get no signals. Their launcher names a file in
    TUNE_STOP_FILE and creates it to stop them.
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
        """Mark the end of training: nothing reads `requested` again, so a signal now raises KeyboardInterrupt.
        Returns whether a stop was requested before."""
        self.has_ended = True
        return self.requested
