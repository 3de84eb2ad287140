"""Preference tuning end to end: the first loss, what is trained, references, one curve in any layout."""

import json
import random
from math import log

import preference_finetune
import pytest
import torch
from helpers import WORDS
from safetensors.torch import load_file

LOSSES = ["DPO", "IPO", "SimPO", "CPO", "ORPO", "KTO"]
NO_REFERENCE = ("SimPO", "CPO", "ORPO")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    draw = random.Random(3)
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"

    def text(most):
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    rows = [
        {"instruction": text(9), "chosen": text(6), "rejected": [f"{text(9)}.", *[text(5)] * (number % 3 == 0)]}
        for number in range(16)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def settings(checkpoint, pairs, tmp_path):
    return [
        f"model.path={checkpoint}", f"dataset.path={pairs}", f"output_dir={tmp_path / 'run'}", "max_seq_len=256",
        "device=cpu", "dtype=fp32", "global_batch_size=16", "epochs=3", "optimizer.lr=1e-3", "schedule.warmup=0",
    ]  # fmt: skip


@pytest.fixture
def run(run_recipe, settings, tmp_path):
    def run(*overrides, folder=tmp_path / "run"):
        assert run_recipe([*settings, f"output_dir={folder}", *overrides], preference_finetune) == 0
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return run


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains_and_raises_the_reward_of_the_better_answers(name, run, checkpoint, tmp_path):
    steps = run(f"loss._component_=tune.losses.{name}")
    first, last = steps[0], steps[-1]
    if name == "DPO":
        assert first["loss"] == pytest.approx(log(2), abs=1e-6)
        assert first["rewards/margins"] == 0
    if name not in NO_REFERENCE:
        assert first["rewards/chosen"] == first["rewards/rejected"] == 0
    assert last["rewards/chosen"] - last["rewards/rejected"] > first["rewards/chosen"] - first["rewards/rejected"]
    assert last["loss"] < first["loss"]
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "run" / "model"))
    assert all(not torch.equal(after[each], before[each]) for each in before)
