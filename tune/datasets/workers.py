"""Map a function over items in several processes, in order; prepare items ahead in a thread."""

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

CHUNK = 64  # items per task
ALONE = 256  # items below which starting processes does not pay

_function: Callable[[list[Any]], Any]  # set by _start in each worker process


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_a_process() -> int:
    """The cores of this machine for each of the processes that a launcher started on it."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def map_chunks(
    function: Callable[[list[Item]], Result], items: Iterable[Item], workers: int | None = None, size: int = CHUNK
) -> Iterator[Result]:
    """Apply `function` to `size` items at a time and yield the results in order. `workers=None`: one process per core.

    Only a few chunks per process are read ahead, so memory stays constant. A TuneError from `items` is raised after the
    results of the items before it. Raises TuneError if a process is killed.
    """
    workers = workers or available_cores()
    failures: list[TuneError] = []

    def readable() -> Iterator[Item]:
        try:
            yield from items
        except TuneError as error:
            failures.append(error)

    source = readable()
    chunks = iter(lambda: list(islice(source, size)), [])
    if size == CHUNK:
        yield from map(function, islice(chunks, ALONE // CHUNK))
    # Processes are cheap here because they are forked; on macOS, some libraries crash after a fork.
    ray = sys.modules.get("ray")  # a fork of a connected process could receive the parent's next answer
    if workers > 1 and sys.platform == "linux" and not (ray and ray.is_initialized()):
        yield from _in_processes(function, chunks, workers)
    else:
        yield from map(function, chunks)
    for failure in failures:
        raise failure


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Make each item in a thread while the previous one is used."""
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
            # The tokenizers library's threads do not survive a fork, and would oversubscribe the cores.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            pending.append(pool.submit(_call, chunk))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise TuneError(
            "a tokenizing process was killed, usually because the machine ran out of memory. "
            f"Set dataset.workers to less than {workers}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(function: Callable[[list[Any]], Any], parent: int) -> None:
    """Set up a worker process: keep the function, leave Ctrl-C to the parent, and exit when the parent does."""
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
