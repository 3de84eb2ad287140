"""GRPO end to end: a reward that rises, what is logged, wrong rewards."""

import itertools
import json

import grpo
import pytest
from helpers import WORDS


def share_of_a(row, completion):
    """How much of the completion is the letter a: partial credit, so that few groups are dead."""
    return completion.count("a") / max(1, len(completion))


NUMBERS = itertools.count()


def different(row, completion):
    """Another value for each completion, so that no group is dead."""
    return next(NUMBERS)


def fails(row, completion):
    return row["no such column"]


def gives_text(row, completion):
    return "good"


def gives_nan(row, completion):
    return float("nan")


@pytest.fixture(scope="session")
def requests(tmp_path_factory):
    file = tmp_path_factory.mktemp("requests") / "requests.jsonl"
    file.write_text("".join(json.dumps({"instruction": f"Say {word}."}) + "\n" for word in WORDS))
    return file


@pytest.fixture
def run(run_recipe, checkpoint, requests, tmp_path):
    def run(*overrides, folder=tmp_path / "run", code=0):
        settings = [
            f"model.path={checkpoint}", f"dataset.path={requests}", f"output_dir={folder}", "max_prompt_len=64",
            "reward=recipes.test_grpo.share_of_a", "sampling.max_new_tokens=12", "prompts_per_step=4", "group_size=8",
            "device=cpu", "dtype=fp32", "optimizer.lr=3e-3", "max_steps=3", *overrides,
        ]  # fmt: skip
        assert run_recipe(settings, grpo) == code
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return run


def test_the_reward_rises(run, requests, tmp_path):
    steps = run(
        "max_steps=24", "epochs=8", "optimizer.lr=1e-2", f"validation_dataset.path={requests}", "validate_first=true"
    )
    first, last = steps[1], steps[-1]
    assert last["reward"] > first["reward"] + 0.3
    assert last["validation_reward"] > steps[0]["validation_reward"] + 0.3
    assert all(abs(step["mismatch_kl"]) < 1e-5 for step in steps[1:])
    assert all(step["reward"] == pytest.approx(step["reward/share_of_a"]) for step in steps[1:])
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 24 * 4 * 8
    of_step = [sample["reward"] for sample in samples if sample["step"] == 3]
    assert sum(of_step) / len(of_step) == pytest.approx(steps[3]["reward"])


@pytest.mark.parametrize(
    "settings",
    [
        ["adapter.rank=8", "kl=0.1", "reference=adapter_off"],
        ["loss._component_=tune.losses.ClippedPolicy", "updates=2", "baseline=leave_one_out"],
        ["loss._component_=tune.losses.GSPO", "mask_truncated=true", "dynamic_sampling=2"],
        ["kl=0.05", "sampling.temperature=0.7", "micro_batch_size=5"],
    ],
)
def test_options(settings, run):
    steps = run(*settings)
    assert len(steps) == 3 and all(step["dead_groups"] <= 4 for step in steps)


@pytest.mark.parametrize(("reward", "message"), [("fails", "KeyError"), ("gives_text", "'good'"), ("gives_nan", "nan")])
def test_a_reward_that_fails_is_told_with_the_completion(reward, message, run, capsys):
    run(f"reward=recipes.test_grpo.{reward}", code=2)
    told = capsys.readouterr().err
    assert f"reward: {reward}" in told and message in told
