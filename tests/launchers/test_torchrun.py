import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import HANGS, free_port

from tune.errors import TuneError
from tune.launchers import torchrun

RECIPE = """\
import sys, time
from pathlib import Path

from tune import distributed

world, folder = distributed.init("cpu"), Path(sys.argv[1])
(folder / f"rank {world.rank} of {world.size}").touch()
while not (folder / "enough").exists():
    time.sleep(0.1)
world.finish()
"""


@pytest.mark.weekly
def test_node_joins_a_running_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    endpoint, agents = f"127.0.0.1:{free_port()}", list[subprocess.Popen[bytes]]()

    def start(is_host: int) -> None:
        options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        options += ["--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host={is_host},last_call_timeout=1"]
        command = [sys.executable, "-m", "tune.cli", "run", *options, str(tmp_path / "mine.py"), str(tmp_path)]
        agents.append(subprocess.Popen(command))

    def wait_for(name: str) -> None:
        deadline = time.monotonic() + HANGS
        while not (tmp_path / name).exists():
            assert not any(agent.poll() for agent in agents) and time.monotonic() < deadline
            time.sleep(0.1)

    try:
        start(is_host=1)
        wait_for("rank 0 of 1")
        start(is_host=0)
        wait_for("rank 0 of 2")
        wait_for("rank 1 of 2")
        (tmp_path / "enough").touch()
        assert [agent.wait(HANGS) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def test_processes_share_the_threads_of_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By default, torchrun gives each of several processes one thread, whatever the number of cores."""
    monkeypatch.setattr("torch.distributed.run.run", lambda chosen: None)
    monkeypatch.setattr("torch.get_num_threads", lambda: 12)
    for setting, threads in ((None, "4"), ("7", "7")):
        monkeypatch.setenv("OMP_NUM_THREADS", setting or "")
        if not setting:
            monkeypatch.delenv("OMP_NUM_THREADS")
        torchrun.launch(["--nproc-per-node", "3"], tmp_path / "mine.py", [], tmp_path)
        assert os.environ["OMP_NUM_THREADS"] == threads


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ["--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        with pytest.raises(TuneError, match=rf"port {port} is in use .*--master-port"):
            torchrun.launch([*options, "--master-port", str(port)], tmp_path / "mine.py", [], tmp_path)


def test_second_node_waits_for_the_first_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        torchrun.wait_for_first_node("127.0.0.1", server.getsockname()[1])
        port = server.getsockname()[1]
    with pytest.raises(TuneError, match=rf"127.0.0.1, port {port}.*--master-addr"):
        torchrun.wait_for_first_node("127.0.0.1", port, patience=0.1)
    with pytest.raises(TuneError, match=r"no\.such\.host\.invalid, port 29500"):
        torchrun.wait_for_first_node("no.such.host.invalid", None, patience=0.1)


@pytest.mark.weekly
def test_second_node_can_be_interrupted_and_may_come_first(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    port = str(free_port())

    def start(rank: int) -> subprocess.Popen[str]:
        options = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        command = [sys.executable, "-m", "tune.cli", "run", *options, "--master-port", port]
        return subprocess.Popen([*command, str(tmp_path / "mine.py"), str(tmp_path)], stderr=subprocess.PIPE, text=True)

    with start(1) as alone:
        assert alone.stderr and port in alone.stderr.readline()  # it waits
        alone.send_signal(signal.SIGINT)
        assert alone.wait(HANGS) == 130
    with socket.create_server(("127.0.0.1", int(port))) as another, start(1) as alone:
        _connections = [another.accept(), another.accept()]  # the second one is torch's, which waits for an answer
        alone.send_signal(signal.SIGINT)
        assert alone.wait(HANGS) in (130, -signal.SIGINT)
    (tmp_path / "enough").touch()
    with start(1) as second:
        assert second.stderr and port in second.stderr.readline()
        with start(0) as first:
            assert (first.wait(HANGS), second.wait(HANGS)) == (0, 0)
    assert {"rank 0 of 2", "rank 1 of 2"} <= {file.name for file in tmp_path.iterdir()}
