import contextlib
import json
import logging
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import HANGS

from tune import launchers, ray_cluster
from tune.cli import main
from tune.distributed import Interrupt
from tune.errors import TuneError
from tune.launchers import launcher, ray


def test_launcher_is_one_more_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def launch(options, recipe, settings, folder):\n    print(options, *settings)\n")
    monkeypatch.setattr(launchers, "__path__", [*launchers.__path__, str(tmp_path)])
    assert launcher("mine").__module__ == "tune.launchers.mine"
    with pytest.raises(TuneError, match="Available: ray, slurm, torchrun, mine"):
        launcher("other")


def test_unknown_launcher() -> None:
    with pytest.raises(TuneError, match=r"'slrm'. Did you mean 'slurm'\? Available: ray, slurm, torchrun"):
        launcher("slrm")


def test_missing_ray_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TuneError, match=r"Ray needs the ray extra \(pip install 'tune-recipes\[ray\]'\): "):
        launcher("ray")([], tmp_path / "recipe.py", [], tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc-per-node", "0"], "argument --nproc-per-node: '0' is not a number of at least 1"),
        (["--nnodes", "2:1"], "--nnodes 2:1: MIN is greater than MAX"),
        (["--gpus-per-worker=-1"], "'-1' is not a number of at least 0"),
        (["--cpus-per-worker=half"], "'half' is not a number of at least 1"),
    ],
)
def test_invalid_options_are_rejected(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((TuneError, SystemExit)) as error:
        launcher("ray")(options, tmp_path / "recipe.py", [], tmp_path)
    assert message in f"{error.value} {capsys.readouterr().err}"


def test_help_and_settings_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--launcher", "ray", "--help"])
    assert "--max-restarts" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # a setting before the recipe
        main(["run", "--launcher", "ray", "seed=1", "full_finetune", "model.path=x", "dataset.path=y"])
    assert "unrecognized arguments: seed=1" in capsys.readouterr().err


def test_cluster_that_does_not_start_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded machine, Ray gives up with a plain Exception."""
    module = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(module, "init", init)
    with pytest.raises(TuneError, match="Ray does not start on this machine: Exception: The current node timed out"):
        ray_cluster.connect(None, 1)


@pytest.mark.slow
def test_internal_ray_errors_are_reported_with_their_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a full disk, to which its controller writes."""
    module = pytest.importorskip("ray")
    from ray.train import ControllerError

    def fails(*_: object) -> int:
        raise ControllerError(OSError(28, "No space left on device"))

    monkeypatch.setattr(ray, "_connected", lambda *_: (module, {"CPU": 1, "GPU": 0}, 1))
    monkeypatch.setattr(ray, "_wait", fails)
    with pytest.raises(TuneError, match=r"error: \[Errno 28\] No space left on device. The same command with"):
        launcher("ray")(["--local"], tmp_path / "recipe.py", [], tmp_path / "run")


def test_checkpoint_reports_are_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    module = pytest.importorskip("ray.train.v2._internal.execution.context")
    caplog.set_level(logging.INFO)  # as in Ray Train's workers
    assert module.logger.isEnabledFor(logging.INFO)
    ray_cluster.quiet()
    assert not module.logger.isEnabledFor(logging.INFO)
    module.logger.setLevel(logging.NOTSET)


def test_workers_stop_when_a_file_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run the recipe in a thread, which receives no signals."""
    monkeypatch.setenv("TUNE_STOP_FILE", str(tmp_path / "stop"))
    before = signal.getsignal(signal.SIGTERM)
    interrupts: list[Interrupt] = []
    thread = threading.Thread(target=lambda: interrupts.append(Interrupt()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not interrupts[0].requested
    (tmp_path / "stop").touch()
    assert interrupts[0].requested


def test_unreachable_address_is_reported_soon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_cluster, "PATIENCE", 1)
    with pytest.raises(TuneError, match=r"cannot reach a Ray cluster at 127\.0\.0\.1:1\. Start one with .*refused"):
        ray_cluster.connect("127.0.0.1:1", 1)
    assert "Ray at 127.0.0.1:1 (at most 1 seconds)" in capsys.readouterr().err


@contextlib.contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Start a server that sends `answer` to every request, and yield its address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(100)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as tcp_server:
        threading.Thread(target=tcp_server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{tcp_server.server_address[1]}"
        tcp_server.shutdown()


def test_address_of_another_service_is_reported_at_once() -> None:
    with (
        server(b"HTTP/1.1 400 Bad Request\r\n") as address,
        pytest.raises(
            TuneError, match=rf"cannot reach a Ray cluster at {address}.*: the server at this address is not Ray"
        ),
    ):
        ray_cluster.connect(address, 1)
    with server(b"\0\0\6\4\0\0\0\0\0\0\5\0\0\x40\0") as address:  # gRPC's settings frame
        ray_cluster.require_answer(address, 0)
        ray_cluster.require_answer(f"ray://{address}", 0)


@pytest.mark.slow
def test_losing_the_cluster_ends_the_command_with_an_error(tmp_path: Path) -> None:
    """Ray would keep waiting in a thread and silently end the process a minute later."""
    program = f"""
import threading
from types import SimpleNamespace
from pathlib import Path
from tune.launchers.ray import _wait
_wait(SimpleNamespace(fit=threading.Event().wait), Path({str(tmp_path)!r}) / "stop", "127.0.0.1:1")
"""
    variables = os.environ | {ray_cluster.LIMIT: "10"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, timeout=HANGS)
    assert done.returncode == 2
    assert "error: --launcher ray: lost the cluster's gcs_server: [Errno 111] Connection refused" in done.stderr
    assert f"The same command with output_dir={tmp_path} continues after the last checkpoint" in done.stderr


def curve(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture
def start(checkpoint: Path, chats: Path, tmp_path: Path):
    """Start the recipe with `tune run OPTIONS` and an output folder of that name; end its remaining processes."""
    started: list[subprocess.Popen[str]] = []

    def run(
        name: str, *options: str, settings: tuple[str, ...] = (), environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", "tune.cli", "run", *options, "full_finetune", f"model.path={checkpoint}",
            f"dataset.path={chats}", f"output_dir={tmp_path / name}", "max_seq_len=64", "device=cpu",
            "compute.dtype=fp32", "global_batch_size=4", "max_steps=12", "epochs=9", "checkpointer.every=4", *settings,
        ]  # fmt: skip
        with (tmp_path / f"{name}.txt").open("a") as output:
            started.append(
                subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                    env=os.environ | {"TEST_FOLDER": str(tmp_path)} | (environment or {}),
                )
            )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


RAY = ("--launcher", "ray", "--nproc-per-node", "2")


@pytest.mark.weekly
def test_loss_curves_match_torchrun_and_one_process(start, tmp_path: Path) -> None:
    launches = {
        "ray": RAY, "torchrun": ("--launcher", "torchrun", "--nproc-per-node", "2"),
        "local": ("--launcher", "ray", "--local"), "alone": (),
    }  # fmt: skip
    for name, options in launches.items():
        assert start(name, *options).wait(HANGS) == 0, (tmp_path / f"{name}.txt").read_text()[-3000:]
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip
    tasks = [start("srun", environment=step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"]
    assert [task.wait(HANGS) for task in tasks] == [0, 0], (tmp_path / "srun.txt").read_text()[-3000:]
    curves = {name: curve(tmp_path / name) for name in (*launches, "srun")}
    assert len(curves["ray"]) == 12
    assert curves["ray"] == curves["torchrun"] == curves["srun"]
    assert curves["local"] == curves["alone"]
    assert list(curves["ray"].values()) == pytest.approx(list(curves["alone"].values()), rel=1e-5)
    reported = json.loads((tmp_path / "ray" / "checkpoint_manager_snapshot.json").read_text())
    names = [Path(result["checkpoint_dir_name"]).name for result in reported["checkpoint_results"]]
    assert names == ["step-00000004", "step-00000008", "step-00000012"]
    losses = [result["metrics"]["loss"] for result in reported["checkpoint_results"]]
    assert losses == [curves["ray"][step] for step in (4, 8, 12)]
    assert "Reporting training result" not in (tmp_path / "ray.txt").read_text()


@pytest.mark.weekly
def test_worker_has_the_configured_number_of_cpus(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, ray\nfrom pathlib import Path\nhas = ray.get_runtime_context().get_assigned_resources()\n"
        "Path(f'cpus-{os.environ[\"RANK\"]}').write_text(str(has['CPU']))\n"
    )
    command = [sys.executable, "-m", "tune.cli", "run", *RAY, "--cpus-per-worker", "3", "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {file.name: float(file.read_text()) for file in tmp_path.glob("cpus-*")} == {"cpus-0": 3.0, "cpus-1": 3.0}


def worker_of(folder: Path) -> int:
    """Return a Ray Train worker whose driver has `folder` in its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_worker = b"ray::RayTrainWorker" in (process / "cmdline").read_bytes()
            if is_worker and str(folder).encode() in (process / "environ").read_bytes():
                return int(process.name)
    raise AssertionError("there is no worker")


@pytest.mark.weekly
def test_ray_data_trains_like_a_stream_and_resumes_after_a_kill(start, chats: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"  # more rows than it reads before it is killed
    many.write_text(4 * chats.read_text())
    stream = ("epochs=1", "max_steps=30", f"dataset.path={many}", "dataset.shuffle_buffer=64")
    whole = start("whole", "--nproc-per-node", "2", settings=(*stream, "dataset.streaming=true"))
    by_ray = (*stream, "dataset._component_=tune.datasets.ray")
    killed = start("killed", *RAY, "--max-restarts", "1", settings=by_ray)
    while not (tmp_path / "killed" / "metrics.jsonl").exists() or 6 not in curve(tmp_path / "killed"):
        assert killed.poll() is None, (tmp_path / "killed.txt").read_text()[-3000:]
        time.sleep(0.02)
    os.kill(worker_of(tmp_path), signal.SIGKILL)
    assert killed.wait(HANGS) == 0, (tmp_path / "killed.txt").read_text()[-3000:]
    assert whole.wait(HANGS) == 0, (tmp_path / "whole.txt").read_text()[-3000:]
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert "continued after step" in (tmp_path / "killed" / "log.txt").read_text()


def actors(*options: str):
    return ray.parser("tune generate").parse_args(["--nproc-per-node", "2", *options])


@pytest.mark.weekly
def test_actor_results_are_ordered_and_dead_actors_are_reported(tmp_path: Path) -> None:
    dead = tmp_path / "has_died"

    def make():
        def square(number: int) -> int:
            if number == 3 and not dead.exists():
                dead.touch()
                os._exit(1)
            if number > 9:
                raise TuneError(f"{number} is too much")
            return number * number

        return square

    with (
        pytest.raises(TuneError, match=r"--launcher ray: .*died.* With --max-restarts N"),
        ray.in_actors(actors(), make, range(6)) as results,
    ):
        assert next(results) == 0
        list(results)
    dead.unlink()
    with (
        pytest.raises(TuneError, match=r"^10 is too much$"),
        ray.in_actors(actors("--max-restarts", "1"), make, range(11)) as results,
    ):
        assert [next(results) for _ in range(10)] == [number * number for number in range(10)]
        next(results)
    assert dead.exists()
