import json
import math
import os
import signal
import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import HANGS, result_of, run_processes

from tune import distributed, processor
from tune.distributed import world
from tune.distributed.srun import first_node, join_step
from tune.errors import TuneError


def test_one_process_is_a_world_of_one():
    world = distributed.init("cpu")
    assert (world.rank, world.size, world.is_main, world.data_rank, world.data_size) == (0, 1, True, 0, 1)
    assert world.fetch(a=world.sum(torch.tensor(2.5)), c=3) == {"a": 2.5, "c": 3}
    assert world.any(True) is True and world.any(False) is False
    assert world.broadcast({"a": 1}) == {"a": 1}


OVER_THE_DATA = """
import json
import sys
from tune import distributed

found = []
for axes in json.loads(sys.argv[1]):
    world = distributed.init("cpu", **axes)
    value = 10.0 ** world.data_rank if world.is_last_stage else -1.0
    part = world.mesh["cp"].get_local_rank() + 1
    found.append([
        world.data_size, world.all_gather(value), world.fetch(sum=world.sum(value))["sum"],
        world.fetch(sum=world.sum_of_parts(part))["sum"], world.from_all_ranks(world.rank), world.broadcast(world.rank),
    ])
everywhere = world.from_all_ranks(found)
assert everywhere == [found] * world.size
print(json.dumps(found))
world.finish()
"""
LAYOUTS = [{}, {"dp_replicate": 2}, {"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}]


@pytest.mark.slow
def test_sums_and_lists_are_over_the_data(tmp_path):
    """Of the processes with the same data, one value counts: that of the last stage."""
    (tmp_path / "script.py").write_text(OVER_THE_DATA)
    found = result_of(run_processes(tmp_path / "script.py", 4, json.dumps(LAYOUTS)))
    for axes, (data_size, gathered, total, parts, ranks, of_first) in zip(LAYOUTS, found, strict=True):
        assert data_size == 4 // math.prod(axes.get(axis, 1) for axis in ("cp", "tp", "pp"))
        assert gathered == [10.0**rank for rank in range(data_size)] and total == sum(gathered), axes
        assert parts == data_size * axes.get("pp", 1) * (3 if "cp" in axes else 1), axes
        assert (ranks, of_first) == ([0, 1, 2, 3], 0)


def test_counts_stay_exact():
    assert distributed.init("cpu").sum(2**40 + 1).item() == 2**40 + 1


def test_mismatched_mesh_is_rejected():
    with pytest.raises(TuneError, match=r"dp_replicate=2 x dp_shard=auto x cp=1 x tp=1 x pp=1 .* 1 processes"):
        distributed.init("cpu", dp_replicate=2)
    with pytest.raises(TuneError, match=r"dp_replicate=1 x dp_shard=3 x cp=1 x tp=1 x pp=1 .* 1 processes"):
        distributed.init("cpu", dp_shard=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_device_is_rejected():
    with pytest.raises(TuneError, match="cuda is not available on this machine; available: "):
        distributed.init("cuda")


def test_process_waits_for_the_configured_timeout():
    world = distributed.init("cpu", timeout=7)
    try:
        groups = [dist.group.WORLD, *world.mesh.get_all_groups(), world.data.get_group()]
        assert [group._get_backend(world.device).options._timeout for group in groups] == [timedelta(minutes=7)] * len(
            groups
        )
    finally:
        distributed.init("cpu")


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(8, 3, 3), (1, 3, 0)])
def test_gpu_of_a_process(visible, local_rank, index, monkeypatch):
    """SLURM shows a task all GPUs of its node, or only one."""

    class Found(Exception): ...

    def set_device(device):
        raise Found(device)

    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: visible,
        "set_device": set_device,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(Found, match=str(index)):
        distributed.init("cuda")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"), ("a,b", "a"), ("gpu[007-009,012],login1", "gpu007"), ("n[3,5-7]-ib", "n3-ib"),
        ("rack[1-2]node[04-08]", "rack1node04"),
    ],
)  # fmt: skip
def test_first_node(nodes, first):
    assert first_node(nodes) == first


def test_only_srun_tasks_join_others():
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NODELIST": "a[1-2]"}
    batch_script = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert join_step({}) == join_step(job) == join_step(job | batch_script) == {}
    task = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    smaller_step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "a2"}
    variables = join_step(job | task)
    assert variables | {"MASTER_PORT": ""} == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a1", "MASTER_PORT": ""
    }  # fmt: skip
    assert join_step(job | task | smaller_step) == variables | {"WORLD_SIZE": "6", "MASTER_ADDR": "a2"}
    assert join_step(job | task | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] != variables["MASTER_PORT"]


LEAVING = """
import atexit
import sys
from pathlib import Path
import torch.distributed as dist
from tune import distributed, processor

for function in ("destroy_process_group", "_abort_process_group"):
    original = getattr(dist.distributed_c10d, function)
    def recorded(*arguments, name=function, original=original):
        print(name, flush=True)
        original(*arguments)
    for module in (dist, dist.distributed_c10d):
        setattr(module, function, recorded)

def threads_of_gloo():  # called at exit after the library's functions, which are registered later
    print(sum("pt_gloo" in file.read_text() for file in Path("/proc/self/task").glob("*/comm")), "threads", flush=True)

def main():
    atexit.register(threads_of_gloo)
    world = distributed.init("cpu")
    print(world.all_gather(world.rank), world.fetch(sum=world.sum(1)), flush=True)
    if world.rank == 1:
        sys.exit("failed")
    world.finish()

main()
"""


@pytest.mark.weekly
def test_srun_tasks_leave_in_order(tmp_path):
    """NCCL's destroy_process_group waits for the others, forever if they wait for a failed process. A remaining gloo
    thread may request the interpreter while it shuts down, which aborts the process."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    slurm = {"SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3"}
    tasks = []
    for rank in "01":
        env = os.environ | slurm | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        command = [sys.executable, str(tmp_path / "leaving.py")]
        tasks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [task.communicate(timeout=HANGS)[0].splitlines() for task in tasks]
    assert outputs[0] == ["[0, 1] {'sum': 2.0}", "destroy_process_group", "0 threads"]
    assert outputs[1][:2] == [
        "[0, 1] {'sum': 2.0}",
        "_abort_process_group",
    ]  # its threads may wait for the other process
    assert [task.returncode for task in tasks] == [0, 1]


def test_interrupt_waits_until_polled(monkeypatch, capfd):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        interrupt = distributed.Interrupt()
        assert not interrupt.requested
        for _ in range(2):  # the second one is the same signal, forwarded by torchrun
            signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested
        assert capfd.readouterr().err.count("SIGTERM: ") == 1
        interrupt.first -= 3
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("theirs", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_gpu_segments_are_expandable_unless_configured(theirs, monkeypatch):
    for name in processor.ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "")  # so that monkeypatch undoes what init sets
        monkeypatch.delenv(name)
    if theirs:
        monkeypatch.setenv(theirs, "max_split_size_mb:128")
    before = {name: os.environ.get(name) for name in processor.ALLOCATOR_SETTINGS}
    monkeypatch.setattr(world, "device_type", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # nothing has used the device before init
    with pytest.raises(TuneError, match=r"device: .* 0 GPUs"):
        distributed.init("cuda")
    changed = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if theirs is None else {}
    assert {name: os.environ.get(name) for name in processor.ALLOCATOR_SETTINGS} == before | changed


MEANS = """
import json
import sys

import torch

from tune import distributed

world = distributed.init("cpu")
rows = torch.tensor(json.loads(sys.argv[1]), dtype=torch.float32)[world.rank]  # [metrics, 2]
means = world.means({name: row for name, row in zip(("loss", "kl", "nothing"), rows, strict=True)})
print(json.dumps({name: value for name, value in world.fetch(**means).items()}))
assert world.means({}) == {}
world.finish()
"""


@pytest.mark.slow
def test_means_divide_the_sums_of_all_processes(tmp_path):
    """They are not means of the means of processes, which may have very different counts."""
    totals = np.array([[[3.0, 4.0], [1e8, 7.0], [0.0, 0.0]], [[5.0, 1.0], [1.0, 93.0], [0.0, 0.0]]])
    (tmp_path / "script.py").write_text(MEANS)
    found = result_of(run_processes(tmp_path / "script.py", 2, json.dumps(totals.tolist())))
    sums = totals.sum(axis=0)
    assert [found["loss"], found["kl"]] == pytest.approx((sums[:2, 0] / sums[:2, 1]).tolist(), rel=1e-12)
    assert math.isnan(found["nothing"])
