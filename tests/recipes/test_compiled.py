"""Compiled runs of the methods that sample and score follow the uncompiled curve."""

import json

import grpo
import ppo_finetune
import pytest
import reward_finetune
import torch
from helpers import slow_but
from recipes.test_grpo import requests  # noqa: F401
from recipes.test_rewards import pairs, rows  # noqa: F401
from torch._dynamo.testing import CompileCounterWithBackend

OF_REWARDS = ["max_prompt_len=64", "reward=recipes.test_grpo.share_of_a", "sampling.max_new_tokens=8"]
RECIPES = {
    "reward_finetune": (reward_finetune, ["max_seq_len=256", "global_batch_size=4", "micro_batch_size=2"]),
    "grpo": (grpo, [*OF_REWARDS, "prompts_per_step=4", "group_size=4", "updates=2"]),
    "environment": (
        grpo,
        [*OF_REWARDS, "prompts_per_step=4", "group_size=4", "environment=recipes.test_grpo.Guess", "max_turns=3"],
    ),
    "ppo_finetune": (ppo_finetune, [*OF_REWARDS, "prompts_per_step=8"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["grpo"], RECIPES))
def test_compiled_run_follows_the_curve(name, run_recipe, checkpoint, pairs, requests, tmp_path, monkeypatch):  # noqa: F811
    """Sampling is not compiled, as every length would need its own compilation."""
    recipe, settings = RECIPES[name]
    data = pairs if recipe is reward_finetune else requests
    common = [
        f"model.path={checkpoint}",
        f"dataset.path={data}",
        *settings,
        "max_steps=2",
        "device=cpu",
        "compute.dtype=fp32",
    ]
    counter, compile = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile(*args, **options, backend=counter))
    torch.compiler.reset()
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    assert run_recipe([*common, f"output_dir={plain}"], recipe) == 0
    assert counter.frame_count == 0
    assert run_recipe([*common, "compute.compile=true", f"output_dir={compiled}"], recipe) == 0
    assert counter.frame_count == 1 if name == "grpo" else counter.frame_count > 0  # padded to one shape
    expected, steps = ([json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (plain, compiled))
    for one, other in zip(steps, expected, strict=True):
        for metric in ("loss", "grad_norm", "reward", "entropy", "value_loss", "rewards/margins", "supervised_tokens"):
            assert one.get(metric, 0) == pytest.approx(other.get(metric, 0), rel=1e-4, abs=1e-5), metric
