"""Harm a small run like a cluster does, and check that it continues, how soon, and that its curve is bitwise the same.

    python examples/cluster/drills.py                                     # every drill once by torchrun and Ray
    python examples/cluster/drills.py --launchers ray --drills worker driver --times 10   # and a table over the times

Two processes on this machine train a model of 100,000 parameters; a checkpoint is saved every 5 steps. Each row of the
table is one drill: the steps that were trained again, the seconds from the harm to the next new step, whether all
losses equal those of an undisturbed run, and whether processes of the run were left over. Exits with 1 if a drill
fails.

    worker      SIGKILL of a worker; the launcher restarts the processes (--max-restarts)
    agent       SIGKILL of torchrun's agent, the process of `tune run`; then the same command again
    driver      SIGKILL of Ray's driver, the process of `tune run`; then the same command again
    node        SIGKILL of one of two Ray nodes; another joins, and the launcher restarts the processes
    store       SIGKILL of the rendezvous: the one of torchrun's two agents that has the store, or Ray's gcs_server,
                without which the run may still finish; all processes must exit on their own; then the same command
                again
    sigterm     SIGTERM to the process of `tune run`, and SIGKILL to all after 30 seconds: a checkpoint is saved at
                once; then the same command again
    full        the disk is full (a file system in memory; needs root, else skipped) until the run reports it; the run
                continues, or the same command continues when there is room
    truncated   SIGKILL as for agent and driver, then the newest checkpoint is truncated: the one before it is used
    hanging     SIGSTOP of a worker: the run names it; after a manual kill, the launcher restarts the processes
    elastic     two agents of torchrun, or Ray nodes, as on two machines: one is killed, and the other continues alone;
                then one joins. Losses are within 1e-5 of an undisturbed run's, as for other numbers of processes
    drained     like elastic, but Ray drains its node, as with a spot instance that is about to end: the run continues
                there until the deadline, then on the other node; no failure is counted
    apart       two agents of torchrun, or Ray nodes, that see different folders, by mount namespaces (needs root, else
                skipped): rejected; then with an object store as output_dir, killed, and continued by two empty machines
"""

import argparse
import importlib.util
import itertools
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tune.ray_cluster import ITS_OWN, VARIABLES

ROOT = Path(__file__).resolve().parents[2]
DRILLS = (
    "worker", "agent", "driver", "node", "store", "sigterm", "full", "truncated", "hanging", "elastic", "drained",
    "apart",
)  # fmt: skip
ONLY = {"agent": "torchrun", "driver": "ray", "node": "ray", "drained": "ray"}  # drills for one launcher
AS_ROOT = ("full", "apart")  # drills that mount a file system
DEADLINE = 15  # seconds from the notice of draining to the end of a node
NOTICE = 30  # seconds from a cluster's SIGTERM to its SIGKILL
OPTIONS = {"torchrun": ["--nproc-per-node", "2"], "ray": ["--launcher", "ray", "--nproc-per-node", "2"]}
EVERY, STEPS = 5, 40


def make_inputs(folder: Path) -> list[str]:
    spec = importlib.util.spec_from_file_location("kill_and_resume", ROOT / "benchmarks" / "kill_and_resume.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    settings: list[str] = module.make_inputs(folder)
    constant = "schedule._component_=tune.optimizers.constant"
    return [*settings, constant, f"max_steps={STEPS}", f"checkpointer.every={EVERY}", "parallel.timeout=1"]


class Outcome(NamedTuple):
    good: bool
    steps_again: int
    seconds: float


class Launch:
    """A `tune run` in a separate session."""

    def __init__(
        self,
        launcher: str,
        settings: list[str],
        folder: Path,
        options: Sequence[str] = (),
        before: Sequence[str] = (),
        output_dir: str = "",
    ):
        self.launcher, self.folder, self.log = launcher, folder, folder.with_suffix(".txt")
        options = options or [*OPTIONS[launcher], "--max-restarts", "1"]
        command = [*before, sys.executable, "-m", "tune.cli", "run", *options, *settings]
        with self.log.open("a", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*command, f"output_dir={output_dir or folder}"],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {"DRILL": str(folder)},
            )

    def wait_for(self, step: int) -> None:
        while step not in losses(self.folder):
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode}:\n{self.log.read_text(encoding='utf-8')[-2000:]}"
            )
            time.sleep(0.05)

    def worker(self) -> int:
        """Return the last of the processes that run the recipe."""
        return max(processes(self.folder, "ray::RayTrainWorker" if self.launcher == "ray" else "full_finetune.py"))


def losses(folder: Path) -> dict[int, float]:
    if not (folder / "metrics.jsonl").exists():
        return {}
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return {each["step"]: each["loss"] for each in (json.loads(line) for line in lines if line.endswith("\n"))}


def continuations(folder: Path) -> list[int]:
    """Return the steps after which the run in `folder` was continued."""
    return [
        int(step)
        for step in re.findall(r"^continued after step (\d+)", (folder / "log.txt").read_text(encoding="utf-8"), re.M)
    ]


def processes(folder: Path, kind: str = "") -> list[int]:
    """Return the processes of the run in `folder`, found by their environment. Ray's two agents per node are excluded:
    they do not write to the folder, and exit a minute after the node."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = (process / "environ").read_bytes().split(b"\0")
            name = (process / "cmdline").read_text(errors="replace", encoding="utf-8")
            if f"DRILL={folder}".encode() in environment and kind in name and not re.match(r"ray::\w+Agent", name):
                found.append(int(process.name))
    return found


def command(process: int) -> str:
    with suppress(OSError):
        return (
            Path(f"/proc/{process}/cmdline")
            .read_text(encoding="utf-8", errors="replace")
            .replace("\0", " ")[-80:]
            .strip()
        )
    return "(ended)"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Agents:
    """Two nodes on this machine, each a torchrun agent; the first has the store."""

    def __init__(self, settings: list[str], folder: Path, nnodes: str = "1:2"):
        self.settings, self.folder, self.nnodes = settings, folder, nnodes
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.first, self.second = self.agent(1), self.agent(0)

    def agent(self, is_host: int) -> Launch:
        store = f"is_host={is_host},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
        options = ["--nnodes", self.nnodes, "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        options += ["--rdzv-id", "drill", "--rdzv-endpoint", self.endpoint, "--rdzv-conf", store]
        return Launch("torchrun", self.settings, self.folder, options)

    def lose_one(self) -> None:
        self.second.process.kill()
        self.second.process.wait()

    def add_one(self) -> None:
        self.second = self.agent(0)

    def end(self) -> None:
        for each in (self.first, self.second):
            each.process.terminate()
        for each in (self.first, self.second):
            each.process.wait()


class Raylets:
    """Two Ray nodes on this machine, with room for one worker each; the first has the gcs_server."""

    def __init__(self, settings: list[str], folder: Path, nnodes: str = "1:2", restarts: int = 3):
        os.environ.update(VARIABLES | ITS_OWN)  # Ray reads them on import
        os.environ["DRILL"] = str(folder)  # for the workers, which the nodes start
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.add_one()
        options = ["--launcher", "ray", "--address", self.cluster.address, "--nnodes", nnodes]
        self.first = Launch("ray", settings, folder, [*options, "--max-restarts", f"{restarts}"])

    def lose_one(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)

    def drain_one(self) -> None:
        """Announce the draining, and kill the node at the deadline."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.cluster.address]
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a drill"]
        deadline = ["--deadline-remaining-seconds", f"{DEADLINE}"]
        subprocess.run([*ray, "--node-id", self.second.node_id, *why, *deadline], check=True)
        threading.Timer(DEADLINE, self.lose_one).start()

    def add_one(self) -> None:
        self.second = self.cluster.add_node(num_cpus=1)

    def end(self) -> None:
        self.first.process.terminate()
        self.first.process.wait()
        self.cluster.shutdown()


def elastic(launcher: str, settings: list[str], folder: Path, drained: bool = False) -> Outcome:
    """Go from 2 to 1 to 2 nodes. Compare with an undisturbed run up to the step at which this one is stopped."""
    many = ["max_steps=5000", "epochs=10000", "global_batch_size=32", "micro_batch_size=4", "optimizer.lr=1e-4"]
    many, restarts = [*settings, *many], 0 if drained else 3
    nodes = Raylets(many, folder, restarts=restarts) if launcher == "ray" else Agents(many, folder)
    stays = nodes.first

    def go_on(times: int) -> tuple[int, float]:
        """Wait for the given number of continuations. Returns the last step before, and the seconds until a new
        step."""
        began, reached = time.monotonic(), max(losses(folder))
        while len(continuations(folder)) < times or max(losses(folder)) <= max(reached, continuations(folder)[-1]):
            assert stays.process.poll() is None, (
                f"the remaining agent has exited:\n{stays.log.read_text(encoding='utf-8')[-2000:]}"
            )
            reached = max(reached, *losses(folder)) if len(continuations(folder)) < times else reached
            time.sleep(0.1)
        return reached, time.monotonic() - began

    stays.wait_for(EVERY * 2 + 3)
    nodes.drain_one() if drained and isinstance(nodes, Raylets) else nodes.lose_one()
    reached, alone = go_on(1)
    nodes.add_one()
    _, together = go_on(2)
    nodes.end()
    undisturbed = Launch("torchrun", many, folder.with_name(f"undisturbed-{folder.name}"))
    last = max(losses(folder))
    undisturbed.wait_for(last)
    undisturbed.process.terminate()
    undisturbed.process.wait()
    found, expected = losses(folder), losses(undisturbed.folder)
    difference = max(abs(found[step] / expected[step] - 1) for step in range(1, last + 1))
    numbers = re.findall(r": (\d+) process\(es\)", (folder / "log.txt").read_text(encoding="utf-8"))
    left, again = processes(folder), max(0, reached - continuations(folder)[0])  # it may still save one
    good = difference <= 1e-5 and numbers == ["2", "1", "2"] and not left and again <= 2 * EVERY
    print(
        f"| {'drained' if drained else 'elastic'} | {launcher} | {again} | {alone:.0f} | {difference:.0e} | "
        f"{len(left) or 'none'} | {'as wanted' if good else 'WRONG'}: {' -> '.join(numbers)} nodes, two again after "
        f"{together:.0f} s |",
        flush=True,
    )
    return Outcome(good, again, alone)


def on_disks(launcher: str, settings: list[str], run: Path, disk: Path, output_dir: str) -> list[Launch]:
    """Run `run` on two nodes, each with its own in-memory file system at `disk`."""
    port = str(free_port())
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && TUNE_LOCAL="$0" exec "$@"', str(disk)]
    if launcher == "torchrun":
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
        ranked = [[*options, "--node-rank", str(rank)] for rank in (0, 1)]
        return [Launch("torchrun", settings, run, each, alone, output_dir) for each in ranked]
    os.environ.update(VARIABLES | ITS_OWN | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)})
    start = [*alone, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
    ways = (["--head", "--port", port, "--include-dashboard", "false"], ["--address", f"127.0.0.1:{port}"])
    started, environment = [], os.environ | {"DRILL": str(run)}
    with run.with_suffix(".nodes.txt").open("a", encoding="utf-8") as out:
        for rank, way in enumerate(ways, 1):
            node = [*start, *way, "--node-ip-address", f"127.0.0.{rank}"]  # so that Ray sees two nodes
            started.append(subprocess.Popen(node, stdout=out, stderr=out, env=environment))
    time.sleep(1)  # until it sees its disk
    inside = ["nsenter", "--target", str(started[0].pid), "--mount", "env", f"TUNE_LOCAL={disk}"]
    options = ["--launcher", "ray", "--nnodes", "2", "--address", f"127.0.0.1:{port}"]
    return [Launch("ray", settings, run, options, inside, output_dir)]


def apart(launcher: str, settings: list[str], folder: Path) -> Outcome:
    """Run on two nodes with separate disks."""
    disk, run = folder.with_name(f"{folder.name}-disk"), folder.with_name(f"{folder.name}-store")
    disk.mkdir()
    # A checkpoint must exist until both nodes have uploaded it, some seconds.
    settings = [*settings, "max_steps=400", "epochs=10000", "checkpointer.every=20", "checkpointer.keep=10"]
    nodes = partial(on_disks, launcher, settings, run, disk)
    began = time.monotonic()
    codes = [each.process.wait() for each in nodes(f"{disk}/run")]
    refused = time.monotonic() - began
    is_refused = 0 not in codes and "is not one folder for all processes" in run.with_suffix(".txt").read_text(
        encoding="utf-8"
    )
    kill(processes(run))
    undisturbed = Launch("torchrun", settings, folder.with_name("undisturbed-apart"))
    both = nodes(f"file://{run}")
    both[0].wait_for(EVERY * 2 + 3)
    while not list(run.glob("checkpoints/*/digests.json")):
        assert not both[0].process.poll(), both[0].log.read_text(encoding="utf-8")[-2000:]
        time.sleep(0.05)
    kill(processes(run))
    for each in both:
        each.process.wait()
    began, reached = time.monotonic(), max(losses(run))
    both = nodes(f"file://{run}")
    both[0].wait_for(reached + 1)
    seconds = time.monotonic() - began
    codes = [each.process.wait() for each in both]
    kind = "ray::RayTrainWorker" if launcher == "ray" else ""
    with suppress(AssertionError):
        wait_until(lambda: not processes(run, kind), 10, "")
    after = max(continuations(run))
    undisturbed.process.wait()
    same, left = losses(run) == losses(undisturbed.folder), processes(run, kind)
    kill(processes(run))  # the nodes of Ray
    good = is_refused and same and not left and not any(codes)
    print(
        f"| apart | {launcher} | {reached - after} | {seconds:.0f} | {'bitwise' if same else 'DIFFERS'} | "
        f"{len(left) or 'none'} | {'as wanted' if good else 'WRONG'}: without a store refused after {refused:.0f} s |",
        flush=True,
    )
    return Outcome(good, reached - after, seconds)


def drill(name: str, launcher: str, settings: list[str], folder: Path, expected: dict[int, float]) -> Outcome:
    with_nodes = name == "node" or (name, launcher) == ("store", "torchrun")
    nodes = (Raylets if launcher == "ray" else Agents)(settings, folder, nnodes="2") if with_nodes else None
    launch = nodes.first if nodes else Launch(launcher, settings, folder)
    launch.wait_for(EVERY * 2 + 3)
    began, reached, note = time.monotonic(), max(losses(folder)), ""
    ends = name in ("agent", "driver", "store", "sigterm", "truncated")
    if name in ("worker", "hanging"):
        worker = launch.worker()
        os.kill(worker, signal.SIGKILL if name == "worker" else signal.SIGSTOP)
        if name == "hanging":
            wait_until(lambda: "says nothing" in launch.log.read_text(encoding="utf-8"), 120, "it is not named")
            note = f", named after {time.monotonic() - began:.0f} s"
            kill([worker])
    elif name == "node":
        assert isinstance(nodes, Raylets)
        nodes.lose_one()
        nodes.add_one()
    elif name == "full":
        fill(folder)
        told = ("could not be written", "the disk is full", "No space left on device")
        wait_until(
            lambda: any(each in launch.log.read_text(encoding="utf-8") for each in told), 60, "a full disk is not told"
        )
        reached = max(losses(folder))
        (folder / "filler").unlink()
        wait_until(lambda: launch.process.poll() is not None or max(losses(folder)) > reached, 60, "it does not go on")
        ends = bool(launch.process.poll())
        note = ", ended with an error" if ends else ", went on"
    elif name == "store":
        kill([launch.process.pid] if launcher == "torchrun" else processes(folder, "gcs_server"))
    else:
        os.kill(launch.process.pid, signal.SIGTERM if name == "sigterm" else signal.SIGKILL)
    if ends:
        patience = NOTICE if name == "sigterm" else 120
        for each in [nodes.first, nodes.second] if isinstance(nodes, Agents) else [launch]:
            threading.Thread(target=each.process.wait, daemon=True).start()  # else it stays in /proc
        deadline = time.monotonic() + patience
        while left := processes(folder):
            assert time.monotonic() < deadline, f"left over after {patience} s: {', '.join(map(command, left))}"
            time.sleep(0.1)
        reached = max(losses(folder))  # without Ray's tables that may be the last one
        ended = f", all ended after {time.monotonic() - began:.0f} s at step {reached}"
        note = note or ended * (name in ("store", "sigterm"))
        if name == "truncated":
            file = next(max((folder / "checkpoints").glob("step-*")).glob("*.distcp"))
            file.write_bytes(file.read_bytes()[:100])
        launch = Launch(launcher, settings, folder)
    elif name != "full":  # a step that was under way may still be written before
        is_over = launch.process.poll  # then what it has printed is told below
        wait_until(lambda: continuations(folder) != [] or is_over() is not None, 300, "it is not continued")
    if reached < STEPS:
        launch.wait_for(reached + 1)
    seconds = time.monotonic() - began
    code = launch.process.wait()
    if isinstance(nodes, Raylets):
        nodes.end()
    with suppress(AssertionError):
        wait_until(lambda: not processes(folder), 10, "")
    after = max(continuations(folder), default=reached)
    same, left = losses(folder) == expected, processes(folder)
    limit = EVERY * (2 + (name in ("truncated", "full")))  # one interval, and what was being saved
    good = same and not left and code == 0 and reached - after <= limit and (name != "sigterm" or reached == after)
    note += ", the one before taken" * ("is damaged" in (folder / "log.txt").read_text(encoding="utf-8"))
    print(
        f"| {name} | {launcher} | {max(0, reached - after)} | {seconds:.0f} | {'bitwise' if same else 'DIFFERS'} | "
        f"{len(left) or 'none'} | {'as wanted' if good else 'WRONG'}{note} |",
        flush=True,
    )
    return Outcome(good, reached - after, seconds)


def fill(folder: Path) -> None:
    """Fill the file system of `folder`."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"0" * 4096):
            pass


def wait_until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{otherwise} after {seconds:.0f} s"
        time.sleep(0.1)


def kill(found: Iterable[int]) -> None:
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a separate file system of 32 MiB in memory at `folder`."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def done(name: str, launcher: str, settings: list[str], folder: Path, expected: dict[int, float]) -> Outcome:
    """Run a drill and return its outcome. If it fails to end, that is the outcome, and its processes are killed."""
    try:
        if name in ("elastic", "drained"):
            return elastic(launcher, settings, folder, name == "drained")
        if name == "apart":
            return apart(launcher, settings, folder)
        with small_disk(folder) if name == "full" else nullcontext():
            return drill(name, launcher, settings, folder, expected)
    except AssertionError as error:
        print(f"| {name} | {launcher} | | | | | WRONG: {' '.join(str(error).split())} |", flush=True)
        kill([*processes(folder), *processes(folder.with_name(f"{folder.name}-store"))])
        return Outcome(False, 0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=OPTIONS, default=[*OPTIONS])
    parser.add_argument("--drills", nargs="+", choices=DRILLS, default=[*DRILLS])
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = make_inputs(folder)
        undisturbed = Launch(options.launchers[0], settings, folder / "undisturbed")
        assert undisturbed.process.wait() == 0, undisturbed.log.read_text(encoding="utf-8")[-3000:]
        expected = losses(folder / "undisturbed")
        print("| drill | launcher | steps again | seconds | curve | left over | |\n|" + "---|" * 7, flush=True)
        results: dict[tuple[str, str], list[Outcome]] = {}
        for time_ in range(options.times):
            for launcher, each in itertools.product(options.launchers, options.drills):
                if launcher != ONLY.get(each, launcher) or (each in AS_ROOT and os.geteuid()):
                    continue
                run = folder / f"{launcher}-{each}-{time_}"
                results.setdefault((each, launcher), []).append(done(each, launcher, settings, run, expected))
    if options.times > 1:
        print("\n| drill | launcher | as wanted | steps again, at most | seconds: median, most |\n|" + "---|" * 5)
    for (each, launcher), found in results.items() if options.times > 1 else ():
        seconds, again = [outcome.seconds for outcome in found], max(outcome.steps_again for outcome in found)
        good = f"{sum(outcome.good for outcome in found)} of {len(found)}"
        print(f"| {each} | {launcher} | {good} | {again} | {median(seconds):.0f}, {max(seconds):.0f} |")
    sys.exit(not all(outcome.good for found in results.values() for outcome in found))


if __name__ == "__main__":
    main()
