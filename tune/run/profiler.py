"""Trace a few optimizer steps with torch.profiler, all ranks in one file."""

import itertools
import json
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from tune.distributed import World
from tune.types import PositiveInt

T = TypeVar("T")
QUESTIONS = 10  # requests for the time; the one with the fastest answer counts


class Clock(NamedTuple):
    """A process's host, the microseconds its clock is behind rank 0's, and their maximum error."""

    host: str
    behind: float = 0.0
    doubt: float = 0.0


def profile(
    batches: Iterable[tuple[int, T]],
    folder: Path,
    world: World,
    start: PositiveInt | None = None,
    steps: PositiveInt = 3,
) -> Iterator[tuple[int, T]]:
    """Iterate over `batches`, and trace optimizer steps `start` to `start + steps - 1` of all ranks.

    The trace is one file in `folder` (for Perfetto or chrome://tracing). `start=None` traces nothing. If an error or an
    interruption ends the run during these steps, each rank's own file stays, because other ranks may not reach the
    merge.
    """
    remaining = iter(batches)
    for step, batch in remaining:
        if start is None or not start <= step < start + steps:
            yield step, batch
            continue
        file = folder / f"steps-{start}-to-{start + steps - 1}.json"
        parts = [file.with_suffix(f".rank-{rank:05d}.json") for rank in range(world.size)]
        profiler = torch.profiler.profile(record_shapes=True)  # of the host, and of a GPU if present
        try:
            with profiler:
                yield step, batch
                yield from itertools.islice(remaining, start + steps - 1 - step)
        finally:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(parts[world.rank]))
        clocks = world.from_all_ranks(_clock(world))
        if world.is_main:
            merge(parts, clocks, file)


def _clock(world: World) -> Clock:
    """Return this process's clock. All ranks call it.

    Processes of one kernel share a clock; others ask rank 0 for the time. Rank 0 is assumed to read it halfway through
    the round trip, with an error of at most half the round trip.
    """
    clock = Clock(socket.gethostname())
    hosts = world.from_all_ranks(_kernel())
    told = torch.zeros((), dtype=torch.int64)
    for rank in (rank for rank, host in enumerate(hosts) if host != hosts[0]):
        for question in range(QUESTIONS):
            if world.rank == rank:
                asked = time.time_ns()
                dist.send(told, 0)
                dist.recv(told, 0)
                taken = time.time_ns() - asked
                if not question or taken / 2e3 < clock.doubt:
                    clock = clock._replace(behind=(int(told) - asked - taken / 2) / 1e3, doubt=taken / 2e3)
            elif world.is_main:
                dist.recv(told, rank)
                dist.send(told.fill_(time.time_ns()), rank)
    return clock


def _kernel() -> str:
    """Return an identifier that processes of one running kernel share."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    return socket.gethostname()


def merge(parts: list[Path], clocks: list[Clock], file: Path) -> None:
    """Merge the traces of all ranks in `parts` into one file in Chrome's format, and remove `parts`.

    Each process is a rank; its threads are the rank's host threads and GPU streams. Times follow rank 0's clock.
    """
    base: Any = None
    with file.open("w", encoding="utf-8") as merged:
        for rank, (part, clock) in enumerate(zip(parts, clocks, strict=True)):
            trace = json.loads(part.read_text(encoding="utf-8"))
            begin = trace.get("baseTimeNanoseconds", 0)
            base = begin if base is None else base
            shift = (begin - base) / 1e3 + clock.behind
            if not rank:
                merged.write(f'{{"displayTimeUnit": "ms", "baseTimeNanoseconds": {base}, "traceEvents": [\n')
            events = list(_of_rank(trace["traceEvents"], rank, len(parts), shift, clock))
            lines = ",\n".join(json.dumps(event) for event in events)
            merged.write(lines + ("\n]}\n" if rank == len(parts) - 1 else ",\n"))
    for part in parts:
        part.unlink()


def _of_rank(
    events: list[dict[str, Any]], rank: int, size: int, shift: float, clock: Clock
) -> Iterator[dict[str, Any]]:
    doubt = f", clock aligned to {clock.doubt:.0f} us" if clock.doubt else ""
    yield _name("process_name", rank, name=f"rank {rank}")
    yield _name("process_labels", rank, labels=clock.host + doubt)
    yield _name("process_sort_index", rank, sort_index=rank)
    labels = {each["pid"]: each["args"]["labels"] for each in events if each["name"] == "process_labels"}
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    rows: dict[tuple[Any, Any], int] = {}
    for event in events:
        if event["ph"] == "M":
            continue
        place = event["pid"], event["tid"]
        if place not in rows:
            rows[place] = len(rows)
            label = f"{labels.get(place[0], place[0])}: {names.get(place, place[1])}"
            yield _name("thread_name", rank, rows[place], name=label)
        own = {"pid": rank, "tid": rows[place], "ts": event["ts"] + shift}
        if isinstance(event.get("id"), int):  # ids of arrows may repeat on other ranks
            own["id"] = event["id"] * size + rank
        yield event | own


def _name(kind: str, rank: int, thread: int = 0, **values: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": values}
