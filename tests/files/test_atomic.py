"""Files and folders appear whole or not at all, however the writing process ends."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tune
from tune.errors import TuneError
from tune.files.atomic import exported, require_replaceable, written_aside

KILLED = """
import os, sys, pathlib
from tune.files.atomic import written_aside
with written_aside(pathlib.Path(sys.argv[1]), folder=True) as unfinished:
    (unfinished / "half").write_text("half")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("folder", [True, False])
def test_old_content_stays_until_the_new_is_complete(tmp_path, folder):
    path = tmp_path / "new" / "a[1]"

    def write(text: str, fails: bool = False) -> None:
        with written_aside(path, folder=folder) as unfinished:
            (unfinished / text if folder else unfinished).write_text(text)
            if fails:
                raise KeyboardInterrupt

    def contents() -> list[str]:
        return [file.name for file in path.iterdir()] if folder else [path.read_text()]

    with pytest.raises(KeyboardInterrupt):
        write("none", fails=True)
    assert not list(path.parent.iterdir())
    write("first")
    with pytest.raises(KeyboardInterrupt):
        write("half", fails=True)
    assert contents() == ["first"]
    write("second")
    assert contents() == ["second"]
    assert list(path.parent.iterdir()) == [path]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    path = tmp_path / "a[1]"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "half").exists() and left != path
    with written_aside(path, folder=True) as unfinished:
        (unfinished / "whole").touch()
    assert [file.relative_to(tmp_path) for file in tmp_path.rglob("*")] == [Path("a[1]"), Path("a[1]/whole")]


KILLED_WHILE_REPLACING = """
import os, sys, pathlib
from tune.files.atomic import written_aside
rename, path = pathlib.Path.replace, pathlib.Path(sys.argv[1])
def replace(self, target):
    if target == path:
        os.kill(os.getpid(), 9)
    return rename(self, target)
pathlib.Path.replace = replace
with written_aside(path, folder=True) as unfinished:
    (unfinished / "new").touch()
"""


def test_folder_that_was_being_replaced_is_put_back(tmp_path):
    """A rename cannot replace a folder, so there is a moment without one."""
    path = tmp_path / "a[1]"
    with written_aside(path, folder=True) as unfinished:
        (unfinished / "old").write_text("old")
    assert subprocess.run([sys.executable, "-c", KILLED_WHILE_REPLACING, str(path)]).returncode == -signal.SIGKILL
    assert sorted(file.name for file in tmp_path.glob("*/*")) == ["new", "old"]  # nothing is lost
    with pytest.raises(KeyboardInterrupt), written_aside(path, folder=True):
        raise KeyboardInterrupt
    assert [file.relative_to(tmp_path) for file in tmp_path.rglob("*")] == [Path("a[1]"), Path("a[1]/old")]
    assert subprocess.run([sys.executable, "-c", KILLED_WHILE_REPLACING, str(path)]).returncode == -signal.SIGKILL
    with written_aside(path, folder=True) as unfinished:
        (unfinished / "newer").touch()
    assert [file.relative_to(tmp_path) for file in tmp_path.rglob("*")] == [Path("a[1]"), Path("a[1]/newer")]


@pytest.mark.parametrize("bytes_of_file", [8, 2**21])
def test_file_that_was_changed_in_place_is_not_replaced(tmp_path, bytes_of_file):
    with exported(tmp_path / "model") as unfinished:
        (unfinished / "model.safetensors").write_bytes(bytes(bytes_of_file))
    require_replaceable(tmp_path / "model")
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.seek(bytes_of_file // 2)
        file.write(b"1")
    with pytest.raises(TuneError, match=r"model\.safetensors"):
        require_replaceable(tmp_path / "model")


def test_files_in_a_folder_have_the_usual_mode(tmp_path):
    """safetensors creates files that only their owner can read: a server under another user could not load them."""
    usual = tmp_path / "usual"
    usual.touch()
    with written_aside(tmp_path / "model", folder=True) as unfinished:
        save_file({"weight": torch.zeros(1)}, unfinished / "model.safetensors")
        (unfinished / "inside").mkdir(mode=0o700)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode == usual.stat().st_mode
    assert (tmp_path / "model" / "inside").stat().st_mode == tmp_path.joinpath("model").stat().st_mode


def test_only_one_module_writes_atomically():
    """Besides files/atomic.py, only checkpoints (written by all processes) and shards (numbered last) are renamed."""
    house = Path(tune.__file__).parent
    renaming = re.compile(r"os\.replace|\.rename\(|unfinished\.replace")
    files = {str(file.relative_to(house)) for file in house.rglob("*.py") if renaming.search(file.read_text())}
    assert files == {"files/atomic.py", "checkpointers/checkpointer.py", "checkpointers/writing.py"}
