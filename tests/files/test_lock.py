"""Two runs must not write to one folder."""

import errno
import fcntl
import itertools
import subprocess
import sys

import pytest

from tune import records
from tune.errors import TuneError
from tune.files import lock

HOLDS = "import sys; from pathlib import Path; from tune.files import lock; lock.hold(Path(sys.argv[1])); print('held')"


@pytest.fixture(autouse=True)
def released(tmp_path):
    yield
    lock.release(tmp_path)


def another_process_holds(folder):
    done = subprocess.run([sys.executable, "-c", HOLDS, str(folder)], capture_output=True, text=True)
    assert (done.returncode == 0) == (done.stdout == "held\n") and (done.returncode == 0 or "TuneError" in done.stderr)
    return done.returncode == 0


def test_folder_stays_locked_when_its_process_reads_there(tmp_path):
    lock.hold(tmp_path)
    assert [*tmp_path.iterdir()] == []  # no run has started
    lock.hold(tmp_path, make=True)
    records.start(tmp_path, 0)
    assert records.read(tmp_path).state == "running"
    lock.hold(tmp_path)  # a second time
    assert not another_process_holds(tmp_path)
    lock.release(tmp_path)
    assert another_process_holds(tmp_path)
    assert records.read(tmp_path).state == "killed"


def test_folder_that_was_removed_and_recreated(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lock.hold(folder, make=True)
    (folder / ".lock").unlink()
    lock.hold(folder, make=True)
    assert not another_process_holds(folder)
    lock.release(folder)


def test_two_writers_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    def begin():
        lock.hold(tmp_path, make=True)
        lock.release(tmp_path)

    ticks = itertools.count()
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(lock.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: None)
    begin()  # no other process was here
    beat = tmp_path / "heartbeat.json"
    beat.write_text("1")
    records.start(tmp_path, 0)
    begin()  # the other process was killed
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: beat.write_text("2"))  # as another process does
    with pytest.raises(TuneError, match="another run is writing to"):
        begin()
    records.end(tmp_path, None)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: pytest.fail("a run that has ended is not waited for"))
    begin()
