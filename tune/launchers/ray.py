"""Ray: TorchTrainer's workers run the recipe, on an existing cluster or a new one on this machine."""

import os
import runpy
import signal
import sys
import uuid
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tune.errors import TuneError
from tune.files import CHECKPOINT
from tune.launchers import count
from tune.lookup import in_shell
from tune.ray_cluster import LIMIT, connect, quiet, require_answer

PASSED_ON = ("TUNE_", "HF_", "PYTHONPATH", "OMP_NUM_THREADS")  # variables that workers on other nodes also need
SAVED = 130  # exit code of a recipe that was asked to stop and saved a checkpoint


class RecipeFailed(Exception):
    """Raised if the recipe ended with an exit code other than 0, after printing the reason."""


def launch(options: Sequence[str], recipe: Path, settings: Sequence[str], folder: Path) -> None:
    """Run the recipe in workers of Ray Train. The run folder is also Ray's folder of results, where its users expect
    checkpoints. SIGINT and SIGTERM reach the workers, which save a checkpoint."""
    chosen = parser("tune run --launcher ray").parse_args(options)
    least, most = (0, 0) if chosen.local else (nodes * chosen.nproc_per_node for nodes in chosen.nnodes)
    ray, needs, _ = _connected(chosen, least, most)
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    tables = "" if chosen.local or ray.util.client.ray.is_connected() else ray.get_runtime_context().gcs_address
    folder, stop = folder.absolute(), folder.absolute() / f".stop-{uuid.uuid4().hex[:8]}"
    place = {
        "folder": os.getcwd(),
        "recipe": str(recipe.absolute()),
        "settings": list(settings),
        "newest": _newest(folder),
        "environment": _passed_on()
        | {"TUNE_STOP_FILE": str(stop), "TUNE_RUN_FOLDER": str(folder), "TUNE_RAY_WORKER": "1"},
    }
    # Ray rejects a folder whose list of checkpoints has missing ones. The run finds its checkpoints without the list.
    (folder / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
    trainer = TorchTrainer(
        _work,
        train_loop_config=place,
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if needs["GPU"] else "gloo"),
        scaling_config=train.ScalingConfig(
            num_workers=most if least == most else (least, most),
            use_gpu=needs["GPU"] > 0,
            resources_per_worker={name: number for name, number in needs.items() if number},
        ),
        run_config=train.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            failure_config=train.FailureConfig(max_failures=chosen.max_restarts),
        ),
    )
    try:
        code = _wait(trainer, stop, tables)
    except (train.TrainingFailedError, RecipeFailed) as error:  # RecipeFailed: with --local
        failures: dict[int, Exception] = getattr(error, "worker_failures", {})
        if any(RecipeFailed.__name__ in repr(each) for each in (error, *failures.values())):
            sys.exit(2)  # the recipe has printed the reason
        which = ", ".join(f"worker {rank}: {str(each).splitlines()[0]}" for rank, each in failures.items())
        which = which or " ".join(str(error).split())  # an error of Ray itself, e.g. a full disk
        raise TuneError(
            f"--launcher ray: {which}. The same command with output_dir={in_shell(folder)} continues after the last "
            "checkpoint; --max-restarts N does that automatically"
        ) from error
    finally:
        stop.unlink(missing_ok=True)
        ray.shutdown()
    sys.exit(code)


@contextmanager
def in_actors(chosen: Any, make: Callable[[], Callable[[Any], Any]], items: Sequence[Any]) -> Iterator[Iterator[Any]]:
    """A context with an iterator over the results for `items`, in order. Several actors compute them, each with its own
    function from `make`; all functions exist when the block begins.

    Raises:
        TuneError: as `make` or its function does; or an actor dies more often than `--max-restarts` allows.
    """
    least, most = (nodes * chosen.nproc_per_node for nodes in chosen.nnodes)
    ray, needs, room = _connected(chosen, least, most)
    kind = ray.remote(_Actor).options(
        num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_restarts=chosen.max_restarts,
        max_task_retries=chosen.max_restarts, runtime_env={"env_vars": _passed_on()},
    )  # fmt: skip
    try:
        count = min(max(least, min(most, room)), len(items))
        actors = [kind.remote(make, os.getcwd()) for _ in range(count)]
        ray.get([actor.start.remote() for actor in actors])
        yield _in_order(ray.util.ActorPool(actors), items)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TuneError):
            raise TuneError(str(error.cause)) from error
        raise
    except ray.exceptions.RayError as error:
        why = " ".join(str(error).split())
        raise TuneError(f"--launcher ray: {why} With --max-restarts N, actors that die are restarted") from error
    finally:
        ray.shutdown()


class _Actor:
    """Run the function from `make` in a separate process; create it again after Ray restarts the process."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], folder: str):
        os.chdir(folder)
        os.environ.pop("SLURM_PROCID", None)  # Ray's nodes may be tasks of a SLURM step, but its actors are not
        self.make = make
        self.function: Any = None

    def start(self) -> None:
        self.function = self.function or self.make()

    def call(self, position: int, item: Any) -> tuple[int, Any]:
        self.start()
        return position, self.function(item)


def _in_order(pool: Any, items: Sequence[Any]) -> Iterator[Any]:
    """Yield results in the order of `items`. `pool.map` would leave actors idle until an earlier one is done."""
    done = pool.map_unordered(lambda actor, numbered: actor.call.remote(*numbered), enumerate(items))
    results: dict[int, Any] = {}
    for position in range(len(items)):
        while position not in results:
            results |= [next(done)]
        yield results.pop(position)


def parser(command: str) -> ArgumentParser:
    """Return the parser for options that choose a cluster and its workers."""
    parser = ArgumentParser(command, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=count, default=1, help="workers per node (default: 1)")
    parser.add_argument(
        "--nnodes", type=_range, default=(1, 1), help="nodes; MIN:MAX uses as many as available (default: 1)"
    )
    parser.add_argument(
        "--address", help="address of a cluster, or auto; default: RAY_ADDRESS, or a new cluster on this machine"
    )
    parser.add_argument("--max-restarts", type=int, default=0, help="failures to recover from (default: 0)")
    parser.add_argument("--cpus-per-worker", type=count, default=1, help="default: 1")
    parser.add_argument("--gpus-per-worker", type=partial(count, least=0), help="default: 1 if the cluster has GPUs")
    parser.add_argument("--local", action="store_true", help="run in this process without a cluster, for a try")
    return parser


def _connected(chosen: Any, least: int, most: int) -> tuple[Any, dict[str, int], int]:
    """Return Ray's module, the resources per worker, and the number of workers that the cluster has room for. `most` 0
    uses no cluster."""
    ray, resources = connect(chosen.address, most * chosen.cpus_per_worker)
    gpus = int("GPU" in resources) if chosen.gpus_per_worker is None else chosen.gpus_per_worker
    needs = {"CPU": chosen.cpus_per_worker, "GPU": gpus}
    for name, number in needs.items():
        if (found := resources.get(name, 0)) < least * number:
            print(f"waiting for {least * number} {name}s: the cluster has {found:.0f}", file=sys.stderr, flush=True)
    return ray, needs, int(min(resources.get(name, 0) / number for name, number in needs.items() if number))


def _passed_on() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    found = count(least), count(most or least)
    if found[0] > found[1]:
        raise TuneError(f"--launcher ray: --nnodes {text}: MIN is greater than MAX")
    return found


def _wait(trainer: Any, stop: Path, tables: str) -> int:
    """Wait for the recipe and return its exit code. A first signal creates the file `stop`, which tells workers to
    stop. If the cluster's `tables` (gcs_server) do not answer, print an error and exit: Ray would end this process
    later, silently."""

    def request(number: int, frame: FrameType | None) -> None:
        if stop.exists():
            os._exit(SAVED)  # Ray ends the workers when their driver is gone
        stop.parent.mkdir(parents=True, exist_ok=True)
        stop.touch()

    with ThreadPoolExecutor(1) as thread:  # Ray would take the main thread's signals
        result = thread.submit(trainer.fit)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, request)
        while not result.done():
            wait([result], timeout=0.5)  # wake up so that Python handles signals
            try:
                require_answer(tables, int(os.environ.get(LIMIT, "60")) - 10)
            except OSError as error:
                again = f"The same command with output_dir={in_shell(stop.parent)} continues after the last checkpoint"
                print(f"error: --launcher ray: lost the cluster's gcs_server: {error}. {again}", file=sys.stderr)
                os._exit(2)
        return int(result.result().return_value or 0)


def _newest(folder: Path) -> str:
    return max((path.name for path in folder.glob(f"checkpoints/{CHECKPOINT}")), default="")


def _work(place: dict[str, Any]) -> int:
    """Run the recipe in a worker. Returns its exit code, and raises RecipeFailed if it fails."""
    quiet()
    os.chdir(place["folder"])
    os.environ.update(place["environment"])
    if _newest(Path(os.environ["TUNE_RUN_FOLDER"])) != place["newest"]:  # a new checkpoint: a restart
        os.environ["TUNE_RESTART_COUNT"] = "1"
    sys.argv = [place["recipe"], *place["settings"]]
    sys.path.insert(0, str(Path(place["recipe"]).parent))
    try:
        runpy.run_path(place["recipe"], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0, SAVED):
            raise RecipeFailed(f"the recipe ended with exit code {end.code}") from None
        return int(end.code or 0)
    return 0
