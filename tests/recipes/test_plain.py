"""recipes/plain.py trains like full_finetune, in one process and in two."""

import json
import re
import runpy
import sys
from pathlib import Path

import full_finetune
import pytest
import torch
from helpers import run_processes
from safetensors.torch import load_file
from torch.testing import assert_close

from tune import cli, config

SCRIPT = config.find_recipe("plain")
STEP = re.compile(r"^step \d+/\d+ \| loss (\S+) \| grad_norm (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def recipe(checkpoint: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of the recipe with the settings that plain.py has in its text."""
    run = tmp_path_factory.mktemp("recipe") / "run"
    settings = [
        f"model.path={checkpoint}",
        f"dataset.path={chats}",
        f"output_dir={run}",
        "device=cpu",
        "compute.dtype=fp32",
        "optimizer.fused=false",
        "max_seq_len=1024",
        "micro_batch_size=2",
        "schedule.min_ratio=0.0",
    ]
    full_finetune.main(config.load("full_finetune", settings))
    return run


def assert_equal(recipe: Path, output: str, model: Path) -> None:
    metrics = [json.loads(line) for line in (recipe / "metrics.jsonl").read_text().splitlines()]
    expected = [(row["loss"], row["grad_norm"]) for row in metrics]
    printed = [(float(loss), float(norm)) for loss, norm in STEP.findall(output)]
    assert len(printed) == len(expected) == 3
    shown, recorded = torch.tensor(printed), torch.tensor(expected)
    assert_close(shown[:, 0], recorded[:, 0], rtol=0, atol=6e-5)  # losses are printed with four decimals
    assert_close(shown[:, 1], recorded[:, 1], rtol=0, atol=6e-4)  # norms with three
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (model, recipe / "model"))
    assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_one_process(recipe, checkpoint, chats, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["plain.py", str(checkpoint), str(chats), str(tmp_path / "trained")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert_equal(recipe, capsys.readouterr().out, tmp_path / "trained")


@pytest.mark.slow
def test_two_processes(recipe, checkpoint, chats, tmp_path):
    output = run_processes(SCRIPT, 2, str(checkpoint), str(chats), str(tmp_path / "trained"))
    assert_equal(recipe, output, tmp_path / "trained")


def test_copy_has_no_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.main(["cp", "plain", "mine.py"])
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    with pytest.raises(SystemExit, match=r"python mine\.py"):
        runpy.run_path("mine.py", run_name="__main__")
