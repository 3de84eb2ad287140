"""Tell on stderr how far the preparation of data is."""

import sys
import time

from tune.datasets.block import Places, RowBlock
from tune.secrets import without_secrets
from tune.terminal import visible

TELL = 10.0  # seconds between lines


class Progress:
    """Prints rows, and the share of the bytes and the time left if they are known, every ten seconds. A row that cannot
    be used is told then, too, once: the preparation of few rows ends with it in its error."""

    def __init__(self, source: str) -> None:
        self.source, self.total = visible(without_secrets(source)), 0
        self.rows = self.bytes = self.unfinished = 0
        self.start = self.last = time.monotonic()
        self.mistake: str | None = None
        self.is_told = False

    def expect(self, total: int) -> None:
        """Add the bytes of pieces to the whole."""
        self.total += total

    def watch(self, chunk: RowBlock, places: Places, max_bad_share: float) -> None:
        """Count rows of a piece that is not finished, and remember the first row that cannot be used."""
        self.unfinished += chunk.rows
        if chunk.mistakes and self.mistake is None:
            number, mistake = chunk.mistakes[0]
            what_next = "it is left out" if max_bad_share else "what is tokenized by then is kept"
            self.mistake = f"{visible(places.of(number))}: {visible(mistake)} ({what_next})"
        self._tell()

    def add(self, rows: int, size: int = 0) -> None:
        """Count rows that are finished, of so many bytes."""
        self.rows, self.bytes, self.unfinished = self.rows + rows, self.bytes + size, 0
        self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self.last < TELL:
            return
        self.last, rows = now, self.rows + self.unfinished
        seconds = now - self.start
        left = ""
        if self.bytes and self.total > self.bytes:
            minutes = seconds * (self.total - self.bytes) / self.bytes / 60
            left = f", {self.bytes / self.total:.0%} of the bytes, {minutes:.0f} minutes left"
        if self.mistake and not self.is_told:
            self.is_told = True
            self._print(self.mistake)
        self._print(f"preparing {self.source}: {rows:,} rows, {rows / seconds:,.0f} rows a second{left}")

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
