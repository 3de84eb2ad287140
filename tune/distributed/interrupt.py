"""Being asked to stop."""

import signal
from types import FrameType


class Interrupt:
    """From its creation on, SIGINT (Ctrl-C) and SIGTERM no longer end the process: they set `requested`.

    Processes are told at different moments, so the recipe sums `requested` over all of them and stops them at one step.
    """

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
