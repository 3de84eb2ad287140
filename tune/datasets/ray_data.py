"""Turn rows into samples with Ray Data, on the nodes of a cluster, once for all processes of a run."""

import os
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import count, islice
from typing import Any

import torch.distributed as dist

from tune.datasets.workers import CHUNK
from tune.errors import TuneError
from tune.lookup import needs
from tune.ray_cluster import connect

BLOCK = 2**20  # bytes of rows per task
IN_FLIGHT = 2**28  # bytes that Ray Data may hold between reading and training, so that memory stays constant


def map_by_ray(
    function: Callable[[list[Any]], Any], rows: Callable[[], Iterator[Any]], workers: int | None
) -> Iterator[Any]:
    """Apply `function` to 64 `rows` at a time in `workers` Ray Data tasks (None: one per free CPU); results in order.

    The tasks reserve no CPU: if the process that waits for their rows has reserved the last one, both would deadlock.
    """
    import ray
    from ray import data

    context, here = data.DataContext.get_current(), os.getcwd()
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = data.ExecutionResources(object_store_memory=IN_FLIGHT)
    context.target_max_block_size, context.target_min_block_size = BLOCK, 1
    context.enable_progress_bars = context.print_on_execution_start = False
    free = int(ray.available_resources().get("CPU", 0))

    def read(_: Any) -> Iterator[dict[str, list[bytes]]]:
        os.chdir(here)
        chunks = rows()
        try:
            for chunk in iter(lambda: list(islice(chunks, CHUNK)), []):
                yield {"rows": [pickle.dumps(chunk)]}
        except TuneError as error:  # in its place, after the earlier rows
            yield {"rows": [pickle.dumps(error)]}

    def work(block: dict[str, Any]) -> dict[str, list[bytes]]:
        os.chdir(here)
        return {"samples": [pickle.dumps(_result(function, pickle.loads(each))) for each in block["rows"]]}

    read_rows = data.from_items([0]).map_batches(read, num_cpus=0)
    tasks = data.TaskPoolStrategy(workers or max(1, free))
    samples = read_rows.map_batches(work, batch_size=None, num_cpus=0, compute=tasks)
    for row in samples.iter_rows():
        found = pickle.loads(row["samples"])
        if isinstance(found, TuneError):
            raise found
        yield found


def require_ray() -> None:
    """Raise TuneError if Ray is not installed."""
    with needs("ray", "Ray"):
        metadata.version("ray")  # importing ray is slow


def _result(function: Callable[[list[Any]], Any], rows: list[Any] | TuneError) -> Any:
    try:
        return rows if isinstance(rows, TuneError) else function(rows)
    except TuneError as error:
        return error


def for_all_processes(chunks: Callable[[int], Iterator[Any]], name: str) -> Callable[[int], Iterator[Any]]:
    """Run `chunks` in a Ray actor, once for all processes of the process group. Each gets all chunks in the same order.

    The actor ends with the process that creates it. All processes must call this.

    Raises:
        TuneError: `chunks` raises it; Ray is not installed or cannot be reached; or the actor or a task is lost.
    """
    ray, _ = connect(None, 0)
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if not ray.is_initialized():
        if processes > 1 and "RAY_ADDRESS" not in os.environ:
            raise TuneError(
                "tune.datasets.ray: several processes need one cluster. Start them with `tune run --launcher ray`, or "
                "set the environment variable RAY_ADDRESS to the cluster's address"
            )
        connect(None, 1)
    label = [uuid.uuid4().hex]
    if processes > 1:
        dist.broadcast_object_list(label)
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # to import functions that settings name
    kind = ray.remote(_Passes).options(
        name=f"tune-data-{label[0]}", namespace="tune", get_if_exists=True, num_cpus=0,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    actor, numbers = kind.remote(chunks, os.getcwd(), processes), count()

    def read(start: int) -> Iterator[Any]:
        number = next(numbers)
        try:
            for index in count():
                (found,) = ray.get(actor.chunk.remote(rank, number, start, index))
                if found is None:
                    return
                if isinstance(result := ray.get(found), TuneError):
                    raise result
                yield result
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1]
            raise TuneError(f"{name}: Ray Data failed: {why} The run can continue from its checkpoint") from error

    return read


class _Passes:
    """An actor that reads the source once per pass and keeps each chunk until all processes have it."""

    def __init__(self, chunks: Callable[[int], Iterator[Any]], folder: str, processes: int):
        os.chdir(folder)
        self.chunks, self.processes = chunks, processes
        self.asked: dict[int, tuple[int, int]] = {}  # rank -> (pass, chunk)
        self.passes: dict[int, tuple[Iterator[Any], dict[int, Any]]] = {}

    def chunk(self, rank: int, number: int, start: int, index: int) -> tuple[Any]:
        """A reference to the chunk or to the TuneError in its place; None after the last chunk."""
        import ray

        self.asked[rank] = number, index
        if len(self.asked) == self.processes:
            oldest, needed = min(self.asked.values())
            self.passes = {each: of_pass for each, of_pass in self.passes.items() if each >= oldest}
            if oldest in self.passes:
                source, held = self.passes[oldest]
                self.passes[oldest] = source, {each: held[each] for each in held if each >= needed}
        if number not in self.passes:
            self.passes[number] = self.chunks(start), {}
        source, held = self.passes[number]
        if index not in held:
            found: Any
            try:
                found = next(source, None)
            except TuneError as error:
                found = error
            held[index] = None if found is None else ray.put(found)
        return (held[index],)
