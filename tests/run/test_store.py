"""A run folder at a URL: it is uploaded during the run, and a run on an empty machine resumes from it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from helpers import HANGS

from tune import distributed
from tune.checkpointers import Checkpointer, disk
from tune.checkpointers.disk import digest_of, found_damage, replace_json, write_digests
from tune.cli import main
from tune.config import local_folder
from tune.errors import TuneError
from tune.files import lock
from tune.run import store
from tune.run.store import Store


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAUSE", 0.02)
    monkeypatch.setattr(store, "PATIENCE", 1.0)


@pytest.fixture(scope="module")
def world():
    return distributed.init("cpu")


def write_checkpoint(folder: Path, step: int, best: int | None = None) -> Path:
    path = folder / "checkpoints" / f".step-{step:08d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": step, "best": {"step": best} if best else {}}))
    (path / "__0_0.distcp").write_bytes(bytes([step]) * 1000)
    write_digests(path, {file.name: digest_of(file) for file in path.iterdir()})
    return path.rename(path.with_name(f"step-{step:08d}"))  # as the checkpointer does: complete or absent


def names(url: str, end: str = "digests.json") -> list[str]:
    files, root = fsspec.url_to_fs(url)
    return sorted(path.split("/")[-2] for path in files.find(root) if path.endswith(end))


def wait_until(condition) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_folder_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNE_LOCAL", raising=False)
    assert local_folder("runs/mine") == Path("runs/mine")
    assert local_folder("s3://bucket/run/") == Path("runs/bucket/run")
    assert local_folder("s3://key:secret@bucket/../run?token=x") == Path("runs/bucket/run")
    with pytest.raises(TuneError, match=r"output_dir: file:// names no folder in its store"):
        local_folder("file://")
    with pytest.raises(TuneError, match=r"output_dir: memory://run is lost when the process ends"):
        local_folder("memory://run")
    monkeypatch.setenv("TUNE_LOCAL", "/scratch")
    assert local_folder("gs://bucket/run") == Path("/scratch/bucket/run")


def test_uploads_are_restored_on_an_empty_machine(url: str, tmp_path: Path, world) -> None:
    first = Store(url, tmp_path / "a", world)
    first.start(print, keep=1)
    for step in (1, 2, 3):
        path = write_checkpoint(tmp_path / "a", step, best=1)
        wait_until(lambda path=path: path.name in names(url))
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step-00000002")  # as the checkpointer does
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "a" / "model").mkdir()
    (tmp_path / "a" / "model" / "config.json").write_text("{}")
    first.finish(None)
    assert names(url) == ["step-00000001", "step-00000003"]
    fsspec.url_to_fs(url)[0].pipe_file(f"{url}/checkpoints/step-00000004/__0_0.distcp", b"half")

    second = Store(url, tmp_path / "b", world)
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file() and path.name != ".store":
            assert (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes() == path.read_bytes()
    assert not (tmp_path / "b" / "checkpoints" / "step-00000004").exists()
    second.start(print, keep=1)
    assert names(url, ".distcp") == ["step-00000001", "step-00000003"]
    wait_until(lambda: first._try())
    assert "another run has begun to write there" in first._try()
    second.finish(None)


def test_folder_stays_locked_during_upload(url: str, tmp_path: Path, world) -> None:
    lock.hold(tmp_path, make=True)
    (tmp_path / "log.txt").write_text("begun\n")
    store = Store(url, tmp_path, world)
    store.start(print, keep=2)
    store.finish(None)
    files, root = fsspec.url_to_fs(url)
    assert [path.rpartition("/")[2] for path in files.find(root) if "/." not in path] == ["log.txt"]
    script = "import sys; from pathlib import Path; from tune.files import lock; lock.hold(Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    lock.release(tmp_path)
    assert f"TuneError: output_dir: another run is writing to {tmp_path}" in " ".join(done.stderr.split())


def state(folder: Path, step: int) -> dict:
    assert not found_damage(folder / "checkpoints" / f"step-{step:08d}")
    return json.loads((folder / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())


def test_best_step_in_an_uploaded_checkpoint_is_updated(url: str, tmp_path: Path, world) -> None:
    """At the end, a step is saved and then measured. A resumed run knows the best step despite an older local copy."""
    first = Store(url, tmp_path / "a", world)
    first.start(print, keep=2)
    write_checkpoint(tmp_path / "a", 1, best=1)
    path = write_checkpoint(tmp_path / "a", 2, best=1)
    wait_until(lambda: len(names(url)) == 2)
    Store(url, tmp_path / "older", world)
    assert state(tmp_path / "older", 2)["best"]["step"] == 1
    for note in (1, 2):  # twice between two uploads
        replace_json(path / "state.json", {"step": 2, "best": {"step": 2}, "note": note})
    first.finish(None)
    for machine in ("older", "new", "a"):
        Store(url, tmp_path / machine, world)
        assert state(tmp_path / machine, 2) == {"step": 2, "best": {"step": 2}, "note": 2}

    replace_json(path / "state.json", {"step": 2, "best": {"step": 1}})  # and the machine is lost before the upload
    again = Store(url, tmp_path / "a", world)
    assert state(tmp_path / "a", 2)["best"]["step"] == 1
    again.start(print, keep=2)
    again.finish(None)
    Store(url, tmp_path / "new", world)
    assert state(tmp_path / "new", 2)["best"]["step"] == 1


def test_notes_updated_after_their_digests_were_uploaded(
    url: str, tmp_path: Path, world, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload between the two reads new digests and old notes."""
    first = Store(url, tmp_path / "a", world)
    first.start(print, keep=2)
    path = write_checkpoint(tmp_path / "a", 1, best=1)
    wait_until(lambda: len(names(url)) == 1)
    written = disk.write_digests

    def looked_at(*arguments: object) -> None:
        written(*arguments)
        first._renew()

    monkeypatch.setattr(disk, "write_digests", looked_at)
    for note in (1, 2):
        replace_json(path / "state.json", {"step": 1, "best": {"step": 1}, "note": note})
    first.finish(None)
    Store(url, tmp_path / "new", world)
    assert state(tmp_path / "new", 1)["note"] == 2


def test_checkpoint_of_another_attempt_with_the_same_step(url: str, tmp_path: Path, world) -> None:
    write_checkpoint(tmp_path / "a", 1)
    store = Store(url, tmp_path / "a", world)
    store.start(print, keep=2)
    store.finish(None)
    path = write_checkpoint(tmp_path / "b", 1)
    (path / "__0_0.distcp").write_bytes(b"of another attempt")
    write_digests(path, {}, "state.json", "__0_0.distcp")
    Store(url, tmp_path / "b", world)
    assert (path / "__0_0.distcp").read_bytes() == bytes([1]) * 1000


@pytest.mark.parametrize("name", ["model/../../outside.txt", "checkpoints/../digests.json"])
def test_store_cannot_write_outside_the_folder(name: str, url: str, tmp_path: Path, world, monkeypatch) -> None:
    write_checkpoint(tmp_path / "a", 1)
    store = Store(url, tmp_path / "a", world)
    store.start(print, keep=2)
    store.finish(None)
    find, get_file = DirFileSystem.find, DirFileSystem.get_file

    def gets_all(files, path, local):
        return Path(local).write_text("it came") if path == name else get_file(files, path, local)

    monkeypatch.setattr(DirFileSystem, "get_file", gets_all)
    monkeypatch.setattr(DirFileSystem, "find", lambda files, below="": [*find(files, below), name])
    with pytest.raises(TuneError, match=re.escape(name)):
        Store(url, tmp_path / "b", world)
    assert not (tmp_path / "outside.txt").exists()


@pytest.mark.slow
def test_failure_is_reported_once_and_retried(url: str, tmp_path: Path, world, monkeypatch) -> None:
    store = Store(url, tmp_path / "a", world)
    messages: list[str] = []
    put_file = store.files.put_file

    def fails(*arguments: str) -> None:
        raise OSError("no way there; token=k7p2mq9zx4")

    monkeypatch.setattr(store.files, "put_file", fails)
    store.start(messages.append)
    write_checkpoint(tmp_path / "a", 1)
    wait_until(lambda: messages)
    time.sleep(0.2)
    assert len(messages) == 1
    assert "is behind: no way there; token=***. The run goes on and tries again" in messages[0]
    assert names(url) == []
    with pytest.raises(TuneError, match=r"is behind .*no way there.* The same command on this machine"):
        store.finish(None)
    monkeypatch.setattr(store.files, "put_file", put_file)
    store.finish(None)
    assert names(url) == ["step-00000001"]


def test_next_start_uploads_what_was_missing(url: str, tmp_path: Path, world) -> None:
    write_checkpoint(tmp_path / "a", 1)
    store = Store(url, tmp_path / "a", world)
    store.start(print, keep=2)
    store.finish(None)
    assert names(url) == ["step-00000001"]
    (tmp_path / "a" / "checkpoints" / "step-00000001" / "__0_0.distcp").write_bytes(b"cut short")
    Store(url, tmp_path / "a", world)
    assert (tmp_path / "a" / "checkpoints" / "step-00000001" / "__0_0.distcp").read_bytes() == bytes([1]) * 1000


@pytest.mark.parametrize("wrong", ["nosuch://bucket/run", "file:///proc/run", "http://127.0.0.1:1/run"])
def test_unusable_url_is_rejected(wrong: str, tmp_path: Path, world) -> None:
    with pytest.raises(TuneError, match=r"output_dir: .* cannot be used: .*\. Is the address right"):
        Store(wrong, tmp_path, world)


def test_local_folder_that_cannot_be_created(url: str, tmp_path: Path, world) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match=re.escape(f"{tmp_path}/file/run")):
        Store(url, tmp_path / "file" / "run", world)


class SecondNode:
    """The process of a second node, which sees the first one's files."""

    rank, is_main = 1, False

    def broadcast(self, value: bytes) -> bytes:
        return b"the first one's"

    def from_all_ranks(self, value: bool) -> list[bool]:
        return [value, value]

    def barrier(self) -> None: ...


def test_nodes_must_not_share_the_disk(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    (tmp_path / ".store").write_text(b"the first one's".hex())
    with pytest.raises(TuneError, match=r"each node writes to its own disk, but .* is shared\. Set TUNE_LOCAL"):
        Store(url, tmp_path, SecondNode())


@pytest.mark.parametrize("reads", [{"keep_best": "validation_loss"}, {"on_nan": "rollback"}])
def test_readers_of_checkpoints_need_all_parts(
    reads: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    (tmp_path / ".store").write_text("")
    model = torch.nn.Linear(1, 1)
    others = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "schedule": None, "data": None}
    with pytest.raises(TuneError, match=r"^output_dir: checkpointer\.keep_best"):
        Checkpointer(tmp_path / "checkpoints", SecondNode(), **others, **reads)


class Node:
    """The world of one of two nodes; each node is a thread."""

    def __init__(self, rank: int, shared: list, meeting: threading.Barrier):
        self.rank, self.is_main, self.shared, self.meeting = rank, rank == 0, shared, meeting

    def from_all_ranks(self, value: object) -> list:
        self.shared[self.rank] = value
        self.meeting.wait(20)
        values = [*self.shared]
        self.meeting.wait(20)
        return values

    def broadcast(self, value: object) -> object:
        return self.from_all_ranks(value)[0]

    def barrier(self) -> None:
        self.meeting.wait(20)


def test_nodes_upload_parts_of_the_same_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/store/run"  # not in memory, where two readers of a file share its position
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(store, "LATE", 0.2)
    nodes = [Node(rank, shared, meeting) for shared, meeting in [([0, 0], threading.Barrier(2))] for rank in (0, 1)]
    with ThreadPoolExecutor(2) as threads:

        def started(node: Node) -> Store:
            store = Store(url, tmp_path / f"{node.rank}", node)
            store.start(print, keep=1)
            return store

        def write(step: int, *ranks: int) -> None:
            for rank in ranks:
                path = write_checkpoint(tmp_path / f"{rank}", step)
                (path / "__0_0.distcp").rename(path / f"__{rank}_0.distcp")
                if rank:
                    (path / "digests.json").unlink()
                    (path / "state.json").unlink()

        first = [*threads.map(started, nodes)]
        pipe_file, failed = first[0].files.pipe_file, list[str]()

        def fails_once(name: str, content: bytes) -> None:
            if name == ".uploading" and not failed:
                failed.append(name)
                raise OSError("no way there")
            pipe_file(name, content)

        monkeypatch.setattr(first[0].files, "pipe_file", fails_once)  # the request is retried
        write(1, 0, 1)
        wait_until(lambda: names(url) == ["step-00000001"])
        write(2, 0)  # the other node no longer has it
        write(3, 0, 1)
        for step in (1, 2):
            shutil.rmtree(tmp_path / "0" / "checkpoints" / f"step-0000000{step}")
        wait_until(lambda: names(url) == ["step-00000003"])
        assert [*threads.map(lambda store: store.finish(None), first)] == [None, None]
        files, root = fsspec.url_to_fs(url)
        assert {path.rpartition("/")[2] for path in files.find(f"{root}/checkpoints")} == {
            "__0_0.distcp", "__1_0.distcp", "digests.json", "state.json"
        }  # fmt: skip
        shutil.rmtree(tmp_path / "1")
        write(4, 0)  # a run cannot resume from one node's part
        second = [*threads.map(started, nodes)]
        for rank in (0, 1):
            assert [path.name for path in (tmp_path / f"{rank}").glob("checkpoints/*")] == ["step-00000003"]
        assert (tmp_path / "1" / "checkpoints" / "step-00000003" / "__1_0.distcp").exists()
        [*threads.map(lambda store: store.finish(None), second)]


@pytest.mark.parametrize("command", [["report"], ["export", "--to", "gguf", "--out", "x.gguf"], ["runs"]])
def test_commands_name_the_local_folder(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "s3://key:secret@bucket/run"])
    message = capsys.readouterr().err
    assert f"s3://bucket/run: tune {command[0]} reads local folders" in message
    assert "writes to runs/bucket/run on its machine" in message


@pytest.fixture
def s3(tmp_path: Path):
    """Start an S3 server with a bucket and yield its environment variables."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    _, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "an-id-of-a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-a-key", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        yield "s3://bucket/run"
    server.stop()


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_killed_run_resumes_on_an_empty_machine(
    kind: str, checkpoint: Path, chats: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("s3") if kind == "s3" else f"file://{tmp_path}/store/run"
    options = [
        "full_finetune", f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=64", "device=cpu",
        "compute.dtype=fp32", "global_batch_size=4", "epochs=90", "checkpointer.every=4", "max_steps=200",
    ]  # fmt: skip

    def start(output_dir: str, machine: str, *changes: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tune.cli", "run", "--nproc-per-node", "2", *options, *changes]
        command.append(f"output_dir={output_dir}")
        variables = os.environ | {"TUNE_LOCAL": str(tmp_path / machine)}
        with (tmp_path / f"{machine}.txt").open("wb") as out:
            return subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)

    whole = start(str(tmp_path / "whole"), "whole", "checkpointer.every=null")
    files, root = fsspec.url_to_fs(url, skip_instance_cache=True)
    killed = start(url, "first")
    deadline = time.monotonic() + HANGS
    while not any(path.endswith("digests.json") for path in files.find(root)):
        assert killed.poll() is None and time.monotonic() < deadline, (tmp_path / "first.txt").read_text()
        files.invalidate_cache()
        time.sleep(0.2)
    for process in Path("/proc").glob("[0-9]*"):  # the agent and its processes, which would save more
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            if f"output_dir={url}".encode() in command and f"dataset.path={chats}".encode() in command:
                os.kill(int(process.name), signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "it was over before"
    shutil.rmtree(tmp_path / "first")
    assert start(url, "second", "checkpointer.every=40").wait(HANGS) == 0, (tmp_path / "second.txt").read_text()
    assert whole.wait(HANGS) == 0

    def curve(text: bytes) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in map(json.loads, text.splitlines())]

    files.invalidate_cache()
    resumed = curve(files.cat_file(f"{root}/metrics.jsonl"))
    assert resumed == curve((tmp_path / "whole" / "metrics.jsonl").read_bytes())
    assert b"continued after step" in files.cat_file(f"{root}/log.txt")
    weights = files.cat_file(f"{root}/model/model.safetensors")
    assert weights == (tmp_path / "whole" / "model" / "model.safetensors").read_bytes()
    for text in [*tmp_path.glob("*.txt"), *(tmp_path / "second").rglob("*.*")]:
        assert not text.is_file() or b"a-secret-of-a-key" not in text.read_bytes()
