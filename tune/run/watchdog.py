"""Report where each process is when a run hangs without an error."""

import contextlib
import faulthandler
import json
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

from tune import records
from tune.distributed import World
from tune.files import CHECKPOINT, written_aside

WAITING = ("torch/distributed/", "tune/distributed/world.py")  # frames of a process that waits for other processes


class Watchdog:
    """A thread in each process that writes stacks when the run hangs.

    If no step has ended for half of `parallel.timeout`, it writes its process's stacks to `folder`/rank-00003.txt. The
    first process then reports which processes the others wait for. Every ten seconds, the first process writes
    `heartbeat.json` next to that folder. With `apart`, each node has its own folder, and one process per node reports.

    A process that writes nothing is stopped, or hangs in a call that holds Python's lock. Its stacks then go to stderr,
    from a thread that does not need the lock.
    """

    def __init__(self, folder: Path, world: World, tell: Callable[[str], None], apart: bool = False):
        self.folder, self.rank, self.size, self.tell = folder, world.rank, world.size, tell
        self.seconds = world.timeout.total_seconds() / 2
        self.thread = threading.get_ident()
        self.step, self.ended = 0, threading.Event()
        self.beaten, self.began = time.monotonic(), time.time()
        self.pause = min(10.0, self.seconds / 4)
        self.seen = [*range(self.size)]
        if apart:
            about = folder.parent.stat()
            here = socket.gethostname(), about.st_dev, about.st_ino
            self.seen = [rank for rank, place in enumerate(world.from_all_ranks(here)) if place == here]
        if world.rank == self.seen[0]:
            shutil.rmtree(folder, ignore_errors=True)
        self._postpone()  # here, because something may block the thread before its first turn
        threading.Thread(target=self._watch, daemon=True).start()

    def beat(self, step: int) -> None:
        """Record the start of a step."""
        self.step, self.beaten, self.began = step, time.monotonic(), time.time()

    def end(self) -> None:
        self.ended.set()

    def _watch(self) -> None:
        told = 0.0
        self._write_heartbeat()
        while not self.ended.wait(self.pause):
            self._postpone()  # this thread has the lock
            self._write_heartbeat()
            if time.monotonic() - self.beaten > self.seconds and told != self.beaten:
                told = self.beaten
                with contextlib.suppress(OSError):  # a full disk
                    self._write()
                    self.ended.wait(2 * self.pause)  # for the other processes
                    found = read(self.folder)
                    if self.rank == min(found, default=self.rank) and told == self.beaten:
                        self.tell(
                            f"warning: no step has ended for {self.seconds + 2 * self.pause:.0f} s. "
                            f"{waited_for(found, self.seen, self.size)} Their stacks are in {self.folder}"
                        )
        faulthandler.cancel_dump_traceback_later()

    def _postpone(self) -> None:
        """Postpone the dump of stacks to stderr, which happens if this is not called again in time."""
        faulthandler.dump_traceback_later(self.seconds + self.pause, file=2)

    def _write_heartbeat(self) -> None:
        """Write heartbeat.json for outside observers: current step, its start, newest checkpoint, and the time.

        The time distinguishes a live process in a long step from a dead one.
        """
        if self.rank == 0:
            run = self.folder.parent
            saved = max((path.name for path in run.glob(f"checkpoints/{CHECKPOINT}")), default=None)
            beat = {"step": self.step, "began": self.began, "checkpoint": saved, "time": time.time()}
            with contextlib.suppress(OSError), written_aside(run / "heartbeat.json") as unfinished:
                unfinished.write_text(json.dumps(beat) + "\n", encoding="utf-8")

    def _write(self) -> None:
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        head = {"rank": self.rank, "step": self.step, "host": socket.gethostname(), **where(frames[self.thread])}
        stacks = {names.get(ident, str(ident)): traceback.format_stack(frame) for ident, frame in frames.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(f"{name}:\n{''.join(lines)}" for name, lines in stacks.items())
        # Other processes may be reading the file.
        with written_aside(self.folder / f"rank-{self.rank:05d}.txt") as unfinished:
            unfinished.write_text(f"{json.dumps(head)}\n\n{text}", encoding="utf-8")


def where(frame: FrameType) -> dict[str, object]:
    """Return the innermost place of a stack, and whether it waits for other processes."""
    stack = traceback.extract_stack(frame)
    waits = any(mark in each.filename for each in stack[-4:] for mark in WAITING)
    return {"waits": waits, "place": f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}"}


def read(folder: Path) -> dict[int, dict[str, object]]:
    """Return the reports of processes by rank, without incomplete files."""
    heads = (records.json_object(file.read_bytes().partition(b"\n")[0]) for file in folder.glob("rank-*.txt"))
    return {int(head["rank"]): head for head in heads if "rank" in head}


def waited_for(found: dict[int, dict[str, object]], seen: Collection[int], size: int) -> str:
    """Name the processes that the others wait for, of the `seen` ranks among `size`.

    These are the processes that wrote nothing, or else those that do not wait.
    """
    some = "" if len(seen) == size else f"Of {size} processes, {', '.join(map(str, seen))} write to this node's disk. "
    if silent := sorted({*seen} - found.keys()):
        why = "stopped, or stuck outside of Python, which its stderr then shows"
        return f"{some}Process {', '.join(map(str, silent))} of {size} says nothing: {why}."
    busy = [head for head in found.values() if not head["waits"]]
    if not busy:
        return f"{some}They wait for those of other nodes." if some else "All processes wait for each other."
    places = (f"process {head['rank']} on {head['host']} ({head['place']}, step {head['step']})" for head in busy[:3])
    return f"{some}The others wait for {'; '.join(places)}."
