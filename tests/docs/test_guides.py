"""The guides of docs/extending.md, followed to the letter: the results work as described."""

import json
import runpy

import pytest
import torch
from docs_reader import BLOCK, ROOT, Reader
from safetensors.torch import load_file
from torch.testing import assert_close

from tune.collators import Batch

PAGE = (ROOT / "docs" / "extending.md").read_text()
GUIDES = dict(section.split("\n", 1) for section in PAGE.split("\n## ")[1:])


@pytest.fixture
def reader(checkpoint, chats, tmp_path):
    return Reader(tmp_path, checkpoint, chats)


def metrics(run, name="loss"):
    return [json.loads(line)[name] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("guide", GUIDES)
def test_guide_is_short(guide):
    code = "".join(block for language, block in BLOCK.findall(GUIDES[guide]) if language in ("python", "diff"))
    assert len(code.splitlines()) < 40


@pytest.mark.slow
def test_recipe_guide(reader):
    reader.follow(GUIDES["A recipe"])
    settings = f"max_steps=3 optimizer.lr={2**-11} schedule._component_=tune.optimizers.constant schedule.warmup=0"
    first = load_file(reader.checkpoint / "model.safetensors")
    for pull, is_at_first in ((2048, True), (100, False)):  # 2048 / 2**11 pulls all the way back
        reader.follow(f"```\ntune run stay_close.py pull={pull} output_dir=pulled_{pull} {settings}\n```\n")
        last = load_file(reader.folder / f"pulled_{pull}" / "model" / "model.safetensors")
        assert all(torch.equal(last[name], tensor) == is_at_first for name, tensor in first.items())
    reader.follow("```\ntune run stay_close.py pull=0 output_dir=free max_steps=3\n```\n")
    reader.follow("```\ntune run full_finetune output_dir=original max_steps=3\n```\n")
    assert metrics(reader.folder / "free") == metrics(reader.folder / "original")


@pytest.mark.slow
def test_loss_guide(reader):
    reader.follow(GUIDES["A loss"])
    focal = runpy.run_path(str(reader.folder / "my_losses.py"))["Focal"](gamma=1.5, chunk_tokens=3)
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 8, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    labels = torch.randint(11, (2, 8))
    labels[0, ::2] = -100
    batch = Batch.of(torch.zeros(2, 8, dtype=torch.long), labels)
    p = (hidden @ weight.T).softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = (-((1 - p) ** 1.5) * p.log())[labels != -100].sum()
    loss = focal(hidden, weight, batch)
    assert_close(loss, expected)
    assert_close(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)))
    assert focal(hidden, weight, Batch.of(torch.zeros(2, 8, dtype=torch.long))) == 0
    assert metrics(reader.folder / "runs" / "1")[0] > 0


def test_dataset_format_guide(reader, capsys):
    reader.follow(GUIDES["A dataset format"])
    shown = capsys.readouterr().out
    assert "⟦4<|im_end|>⟧" in shown
    assert "⟦6<|im_end|>⟧" in shown


@pytest.mark.slow
def test_logger_guide(reader):
    reader.follow(GUIDES["A logger"])
    table = [line.split(",") for line in (reader.folder / "losses.csv").read_text().splitlines()]
    run = reader.folder / "runs" / "1"
    assert [(int(step), float(loss)) for step, loss in table] == list(
        zip(metrics(run, "step"), metrics(run), strict=True)
    )
