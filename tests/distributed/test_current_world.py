"""A World in your own script, with and without a process group."""

import subprocess
import sys

import pytest
import torch
from helpers import run_processes

from tune import distributed
from tune.errors import TuneError

ONE_PROCESS = """
import os
import torch.distributed as dist
from tune.distributed import current_world

before = dict(os.environ)
world = current_world()
assert (world.rank, world.size, world.data_rank, world.data_size) == (0, 1, 0, 1)
assert world.fetch(sum=world.sum(2.5)) == {"sum": 2.5}
assert world.all_gather("a") == ["a"]
assert current_world(world) is world
assert not dist.is_initialized()

assert world.mesh.size() == 1 and dist.is_initialized()
assert current_world() is world and world.device.type in ("cpu", "cuda", "mps")
assert world.fetch(sum=world.sum(2.5)) == {"sum": 2.5}
assert dict(os.environ) == before
"""

THEIRS = """
from datetime import timedelta
import torch
import torch.distributed as dist
from tune import distributed
from tune.distributed import current_world

def timeout(group):
    return group._get_backend(torch.device("cpu")).options._timeout

dist.init_process_group("gloo", timeout=timedelta(seconds=77))
theirs = dist.new_group([0, 1], timeout=timedelta(seconds=33))
world = current_world()
rank = dist.get_rank()
assert world.timeout == timeout(dist.group.WORLD) == timedelta(seconds=77), world.timeout
assert (world.rank, world.size, world.data_rank, world.data_size) == (rank, 2, rank, 2)
assert world.fetch(sum=world.sum(rank + 1.0)) == {"sum": 3.0}
assert {timeout(group) for group in world.mesh.get_all_groups()} == {timedelta(seconds=77)}

sharing = distributed.init("cpu", tp=2, timeout=5)
assert current_world() is sharing and sharing.data_size == 1
assert timeout(dist.group.WORLD) == timedelta(seconds=77)
assert timeout(theirs) == timedelta(seconds=33)
assert timeout(sharing.mesh.get_group("cp")) == timedelta(minutes=5)
dist.destroy_process_group()
print("done")
"""


@pytest.mark.slow
def test_script_without_a_process_group(tmp_path):
    (tmp_path / "one.py").write_text(ONE_PROCESS)
    subprocess.run([sys.executable, str(tmp_path / "one.py")], check=True, capture_output=True, text=True)


@pytest.mark.slow
def test_existing_process_group_is_kept(tmp_path):
    (tmp_path / "theirs.py").write_text(THEIRS)
    assert "done" in run_processes(tmp_path / "theirs.py", 2)


@pytest.mark.parametrize(("is_initialized", "index"), [(True, 2), (False, 3)])
def test_selected_gpu_of_a_process_is_used(is_initialized, index, monkeypatch):
    gpu = {"is_available": True, "is_initialized": is_initialized, "current_device": 2, "device_count": 8}
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert distributed.world._device_of(None) == torch.device("cuda", index)


def test_several_processes_without_a_group_are_rejected(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed.world.dist, "is_initialized", lambda: False)
    with pytest.raises(TuneError, match="WORLD_SIZE is 2"):
        distributed.current_world()
