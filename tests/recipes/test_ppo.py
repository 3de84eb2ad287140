"""PPO end to end: a reward that rises, values that learn, advantages by the formula."""

import json

import numpy as np
import ppo_finetune
import pytest
import torch
from recipes.test_grpo import requests  # noqa: F401

from tune.collators import Sample, collate
from tune.losses import gae


@pytest.fixture
def run(run_recipe, checkpoint, requests, tmp_path):  # noqa: F811
    def run(*overrides, folder=tmp_path / "run"):
        settings = [
            f"model.path={checkpoint}", f"dataset.path={requests}", f"output_dir={folder}", "max_prompt_len=64",
            "reward=recipes.test_grpo.share_of_a", "sampling.max_new_tokens=12", "prompts_per_step=16",
            "device=cpu", "dtype=fp32", "optimizer.lr=3e-3", "max_steps=3", "epochs=20", *overrides,
        ]  # fmt: skip
        assert run_recipe(settings, ppo_finetune) == 0
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return run


def test_the_reward_rises_and_values_learn(run):
    steps = run("max_steps=30", "epochs=60", "samples_per_prompt=2", "kl=0.01")
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
    assert abs(steps[-1]["value"] - steps[-1]["return"]) < 0.2


def test_advantages_are_those_of_the_formula():
    draw = np.random.default_rng(0)
    lengths, decay = (4, 1, 6), 0.9
    samples = [
        Sample(np.arange(length), np.arange(length), columns={"advantage": np.float32(number)})
        for number, length in enumerate(lengths, 1)
    ]
    batch = collate([[sample] for sample in samples])
    rewards, values = (torch.tensor(draw.normal(size=sum(lengths))) for _ in range(2))
    found, start = gae(rewards, values, batch, decay), 0
    for number, length in enumerate(lengths, 1):
        r, v = rewards[start : start + length].clone(), [*values[start : start + length], 0.0]
        r[-1] += number
        deltas = [r[at] + v[at + 1] - v[at] for at in range(length)]
        for at in range(length):
            expected = sum(decay**ahead * delta for ahead, delta in enumerate(deltas[at:]))
            assert found[start + at].item() == pytest.approx(float(expected), abs=1e-6)
        start += length
