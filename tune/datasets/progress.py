"""Tell how far the preparation of data is: a bar on a terminal, else a line on stderr now and then, and always a line
for the logger `tune.datasets`, which a run writes to its log.txt."""

import logging
import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tune.datasets.block import Places, RowBlock
from tune.secrets import without_secrets
from tune.terminal import visible

LOGGER = logging.getLogger("tune.datasets")
TELL = 10.0  # seconds until the first line
RARELY = 20  # later lines come after this part of the time so far: a preparation of ten hours has about 120


class PreparationProgress:
    """Counts rows, and the bytes of pieces if they are known. Nothing is told of a preparation of a few seconds: its
    error, if any, names the rows that cannot be used."""

    def __init__(self, source: str) -> None:
        self.source = visible(without_secrets(source))
        self.rows = self.unfinished = self.bytes = self.total = 0
        self.begin = time.monotonic()
        self.next = self.begin + TELL
        self.mistake: str | None = None  # the first one, until it is told
        self.has_mistake = False
        self.bar: Progress | None = None

    def expect(self, total: int) -> None:
        """Add the bytes of pieces to the whole."""
        self.total += total

    def watch(self, chunk: RowBlock, places: Places, max_bad_share: float) -> None:
        """Count rows of a piece that is not finished, and note the first row that cannot be used."""
        self.unfinished += chunk.rows
        if chunk.mistakes and not self.has_mistake:
            self.has_mistake = True
            number, mistake = chunk.mistakes[0]
            what_next = "it is left out" if max_bad_share else "what is tokenized by then is kept"
            self.mistake = f"{visible(places.of(number))}: {visible(mistake)} ({what_next})"
        self._tell()

    def add(self, rows: int, size: int = 0) -> None:
        """Count rows that are finished, of so many bytes."""
        self.rows, self.bytes, self.unfinished = self.rows + rows, self.bytes + size, 0
        self._tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def _tell(self) -> None:
        now = time.monotonic()
        rows = self.rows + self.unfinished
        if self.bar:
            description = f"{self.source}: {rows:,} rows"
            self.bar.update(self.task, description=description, completed=self.bytes, total=self.total or None)
        if now < self.next:
            return
        seconds = max(now - self.begin, 1e-9)
        self.next = now + max(TELL, seconds / RARELY)
        if self.mistake:
            self._print(self.mistake)
            self.mistake = None
        left = ""
        if self.bytes and self.total > self.bytes:
            minutes = seconds * (self.total - self.bytes) / self.bytes / 60
            left = f", {self.bytes / self.total:.0%} of the bytes, {minutes:.0f} minutes left"
        line = f"preparing {self.source}: {rows:,} rows, {rows / seconds:,.0f} rows a second{left}"
        if sys.stderr.isatty():
            LOGGER.info(line)
            self._show_bar()
        else:
            self._print(line)

    def _show_bar(self) -> None:
        if not self.bar:
            columns = TextColumn("preparing {task.description}", markup=False), BarColumn(16), TimeRemainingColumn()
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(self.source, total=None)
            self.bar.start()

    def _print(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        LOGGER.info(line)
        if self.bar:
            self.bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
