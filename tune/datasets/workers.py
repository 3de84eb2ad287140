"""A function over many items in several processes, results in order; and items that are made ahead in a thread."""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from typing import Any, TypeVar

from tune.errors import TuneError

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK = 64  # items that a process gets at a time
ALONE = 256  # items before it is worth to start processes

_function: Callable[[list[Any]], Any]  # of a process that _start has made a worker


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_chunks(
    function: Callable[[list[Item]], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """`function` of 64 items at a time, in order. `workers=None`: as many processes as there are cores.

    No more than a few chunks a process are read ahead, so memory stays constant. What `items` raises is raised behind
    the results of what came before it. Raises TuneError if a process is killed.
    """
    workers = workers or available_cores()
    failures: list[TuneError] = []

    def readable() -> Iterator[Item]:
        try:
            yield from items
        except TuneError as error:
            failures.append(error)

    source = readable()
    chunks = iter(lambda: list(islice(source, CHUNK)), [])
    yield from map(function, islice(chunks, ALONE // CHUNK))
    # Forking is what makes processes cheap here; macOS has libraries that do not stand it.
    ray = sys.modules.get("ray")  # where a process is connected, a fork may take the answer to its next question
    if workers > 1 and sys.platform == "linux" and not (ray and ray.is_initialized()):
        yield from _in_processes(function, chunks, workers)
    else:
        yield from map(function, chunks)
    for failure in failures:
        raise failure


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Each item is made, in a thread, while the one before it is used."""
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, items, None)
            yield item


def _in_processes(
    function: Callable[[list[Any]], Result], chunks: Iterator[list[Any]], workers: int
) -> Iterator[Result]:
    pending: deque[Any] = deque()
    pool = ProcessPoolExecutor(workers, get_context("fork"), _start, (function, os.getpid()))
    try:
        for chunk in chunks:
            # The threads of the tokenizers library do not survive a fork, and would be too many in each process.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            pending.append(pool.submit(_call, chunk))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise TuneError(
            "a process that tokenises was killed, usually because the machine ran out of memory: "
            f"set dataset.workers to less than {workers}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(function: Callable[[list[Any]], Any], parent: int) -> None:
    """In a new process: it keeps the function that it was forked with, leaves Ctrl-C to its parent and dies with it."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _call(chunk: list[Any]) -> Any:
    return _function(chunk)


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
