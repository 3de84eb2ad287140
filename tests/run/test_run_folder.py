"""The folder of a run, on which several processes and several starts must agree."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import HANGS

from tune import config
from tune.run import run_folder

STARTS = Path(__file__).with_name("starts.py")


@pytest.mark.weekly
def test_torchrun_restarts_keep_the_folder_and_all_processes_must_see_it(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", STARTS]
    env = os.environ | {"OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO"}
    env.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)  # `tune run` sets it, also in an earlier test
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = re.findall(r"start (\d): (\S+) resume=(\w+)", done.stdout)
    assert first[1] == second[1] and re.fullmatch(r"runs/mine-\d{8}-\d{6}", first[1]), done.stdout + done.stderr
    assert (first[2], second[2]) == ("never", "auto")
    node = socket.gethostname()
    expected = [
        f"output_dir: {STARTS}/run cannot be made or written (Not a directory)",
        "output_dir: runs/apart is not one folder for all processes",
        f"dataset.path: the files of rows.jsonl on {node} differ from those on {node}, so that each would train on its",
        f"model.path: the files of model on {node} differ from those on {node}, so that each would train on its own.",
        f"dataset: the rows on {node} differ from those on {node}, so that each would train on its own.",
        f"dataset.validation: rows.jsonl is missing on {node}, but exists on other nodes",
    ]
    for rank in range(2):
        messages = (tmp_path / f"told-{rank}.txt").read_text().splitlines()
        assert [line for line in expected if not any(line in message for message in messages)] == [], messages


def test_requeued_batch_job_keeps_the_folder(monkeypatch):
    alone = SimpleNamespace(is_main=True, timeout=None, broadcast=lambda value: value)
    monkeypatch.delenv("ENVIRONMENT", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    by_time = r"runs/mine-\d{8}-\d{6}"  # a shell in `srun --pty` starts many runs in one step
    assert re.fullmatch(by_time, run_folder.choose(None, "mine", alone))
    monkeypatch.setenv("ENVIRONMENT", "BATCH")  # for a batch script and its steps
    assert run_folder.choose(None, "mine", alone) == "runs/mine-17.2"
    assert run_folder.choose("given", "mine", alone) == "given"
    monkeypatch.delenv("SLURM_STEP_ID")
    assert re.fullmatch(by_time, run_folder.choose(None, "mine", alone))


@pytest.mark.slow
def test_settings_of_every_start_are_kept(tmp_path):
    def start(*settings):
        return config.save(config.load("full_finetune", ["model.path=m", "dataset.path=d", *settings]), tmp_path)

    assert start() == start("output_dir=x", "resume=x") == []
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
    changes = ["optimizer.lr: 2e-05 -> 0.1", "parameter_groups.lr_ratios.norm: null -> 0.5"]
    assert sorted(start("optimizer.lr=0.1", "parameter_groups.lr_ratios={norm: 0.5}"))[:1] == changes[:1]
    assert start("optimizer.lr=0.1", "parameter_groups.lr_ratios={norm: 0.5}") == []
    assert start("optimizer.lr=0.2", "parameter_groups.lr_ratios={norm: 0.5}") == ["optimizer.lr: 0.1 -> 0.2"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config-2.yaml", "config-3.yaml", "config.yaml"]
    again = config.load("full_finetune", ["--config", str(tmp_path / "config-3.yaml")])
    assert again.optimizer.lr == 0.2
