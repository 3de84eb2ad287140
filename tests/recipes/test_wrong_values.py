"""One or two wrong values at a time, in any setting of any recipe, are accepted or reported without a traceback.

`tune validate` reports the same problems in the settings as `tune run`.
"""

import json
import os
import random
import time

import pytest
from helpers import WORDS, save_checkpoint, weekly_but
from omegaconf import OmegaConf

from tune import config
from tune.cli.recipes import recipe_of
from tune.errors import TuneError
from tune.validate.checks import validate

VALUES = [
    "3.5", "3.0", "abc", "-1", "[]", "[a,1]", "{a: 1}", "true", "null", "0", "1e400", ".nan", "-.inf", "1e38",
    "${nope}", "${oc.env:NOT_SET}", "${.}", "20241126", "''", "[[1]]", "{}", "[null]", "99999999999999999999", "1e-300",
    "???", "{_component_: os.getcwd}", "{_component_: no.such}", "builtins.len", "os.path", "[0.9,1.5]", "{a: {b: x}}",
    "{b: ${nope}}", "é #x", "x" * 300,
]  # fmt: skip
RECIPES = {
    "full_finetune": ["dataset.path=chats.jsonl"],
    "lora_finetune": ["dataset.path=chats.jsonl"],
    "pipeline_finetune": ["dataset.path=chats.jsonl"],
    "distill": ["dataset.path=chats.jsonl", "teacher.path=model"],
    "preference_finetune": ["dataset.path=pairs.jsonl"],
    "reward_finetune": ["dataset.path=pairs.jsonl"],
    "grpo": ["dataset.path=prompts.jsonl", "reward=rewarding.length", "prompts_per_step=4"],
    "ppo_finetune": ["dataset.path=prompts.jsonl", "reward=rewarding.length", "prompts_per_step=4", "value.path=model"],
    "evaluate": ["dataset.path=chats.jsonl"],
}
# Errors found by hand, each of a different kind.
KNOWN = [
    ("full_finetune", "max_steps=-1"),
    ("full_finetune", "output_dir={a: 1}"),
    ("full_finetune", "parallel.cp=${nope}"),
    ("full_finetune", "output_dir=${.}"),
    ("evaluate", "model.path=${.}"),
    ("full_finetune", "parallel.dp_shard=???"),
    ("full_finetune", "parameter_groups.lr_ratios=x"),
    ("full_finetune", "parameter_groups.lr_ratios={'[': 2}"),
    ("full_finetune", "optimizer._component_=1e-300"),
    ("full_finetune", "optimizer._component_=builtins.len"),
    ("full_finetune", "tokenizer={_component_: os.getcwd}"),
    ("full_finetune", "seed=99999999999999999999"),
    ("full_finetune", f"seed={'[' * 3000}{']' * 3000}"),
    ("full_finetune", f"resume={'x' * 300}"),
    ("lora_finetune", "evaluate.tasks=[null]"),
    ("pipeline_finetune", "parallel.pp_schedule=[]"),
    ("pipeline_finetune", "adapter=[a,1]"),
    ("ppo_finetune", "reward=${oc.env:NOT_SET}"),
    ("evaluate", "model.path=0.0"),
    ("evaluate", "model.path=null"),
    ("evaluate", "tasks=[null]"),
    ("evaluate", "dataset.path=null"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model and rows for every recipe."""
    folder = tmp_path_factory.mktemp("wrong-values")
    save_checkpoint(folder / "model", hidden_size=16, intermediate_size=32, num_hidden_layers=2)
    rows = {
        "chats": lambda word: {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]},
        "pairs": lambda word: {"instruction": word, "chosen": f"{word} sat", "rejected": "no"},
        "prompts": lambda word: {"prompt": word},
    }
    for name, row in rows.items():
        text = "".join(json.dumps(row(word)) + "\n" for word in WORDS[:8])
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "rewarding.py").write_text("def length(row, completion):\n    return float(len(completion))\n")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def settings(recipe: str, *overrides: str) -> list[str]:
    usual = [
        "compute.dtype=fp32",
        "device=cpu",
        "output_dir=run",
        "max_steps=2",
        "max_seq_len=64",
        "micro_batch_size=1",
    ]
    if recipe in ("grpo", "ppo_finetune"):
        usual = [*usual[:4]]
    return ["model.path=model", *RECIPES[recipe], *(usual if recipe != "evaluate" else []), *overrides]


def keys(recipe: str) -> list[str]:
    paths = []

    def collect(values: dict, prefix: str) -> None:
        for name, value in values.items():
            paths.append(f"{prefix}{name}")
            if isinstance(value, dict):
                collect(value, f"{prefix}{name}.")

    collect(OmegaConf.to_container(config.read(recipe, settings(recipe))[0]), "")
    return paths


def found_by_both(recipe: str, *wrong: str) -> tuple[list[str], list[str]]:
    """Return the problems that `tune run` finds in the settings, and the errors of `tune validate`."""
    overrides = settings(recipe, *wrong)
    cfg, problems = config.read(*recipe_of(recipe, overrides))
    errors = [
        str(finding)
        for finding in validate(config.find_recipe(recipe), cfg, problems, rows=8)
        if finding.level == "error"
    ]
    if problems:
        with pytest.raises(TuneError) as refused:
            config.load(recipe, overrides)
        assert all(problem in str(refused.value) for problem in problems)
    return problems, errors


def require_agreement(recipe: str, *wrong: str) -> None:
    problems, errors = found_by_both(recipe, *wrong)
    places = {
        error.partition(":")[0] for error in errors
    }  # validate reports only the first of several errors about a setting
    assert {problem.partition(":")[0] for problem in problems} <= places
    names = [setting.partition("=")[0].removesuffix("._component_") for setting in wrong]
    assert not problems or any(name in problem for problem in problems for name in names)
    assert os.path.exists("run") is False


def draw_and_check(seconds: float, most: int) -> int:
    seed = int(os.environ.get("FUZZ_SEED", 0))  # other seeds find more: FUZZ_SEED=$RANDOM
    draw, count, end = random.Random(seed), 0, time.monotonic() + seconds
    known = {recipe: keys(recipe) for recipe in RECIPES}
    while count < most and time.monotonic() < end:
        recipe = draw.choice([*RECIPES])
        wrong = [f"{key}={draw.choice(VALUES)}" for key in draw.sample(known[recipe], draw.choice([1, 1, 2]))]
        try:
            require_agreement(recipe, *wrong)
        except Exception as error:
            raise AssertionError(f"FUZZ_SEED={seed}: {recipe} {' '.join(wrong)}") from error
        count += 1
    return count


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("recipe", "wrong"),
    weekly_but([case for case in KNOWN[::4] if "tasks" not in case[1]], KNOWN),
    ids=[f"{recipe}-{wrong[:40]}" for recipe, wrong in KNOWN],
)
def test_wrong_value_is_reported_by_its_key(recipe, wrong, here):
    _, errors = found_by_both(recipe, wrong)
    key = wrong.partition("=")[0].removesuffix("._component_")
    nothing_to_do = recipe == "evaluate" and wrong == "dataset.path=null"
    assert errors and (nothing_to_do or all(error.startswith(key) for error in errors)), errors


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["parallel.pp=2"], ["micro_batch_size=4"], ["micro_batch_size=0"]])
def test_wrong_batch_size_causes_no_follow_up_errors(others, here):
    _, errors = found_by_both("pipeline_finetune", "global_batch_size=0", *others)
    wrong = {"global_batch_size", *(other.partition("=")[0] for other in others if other.endswith("=0"))}
    of_sizes = {error.partition(":")[0] for error in errors if "batch" in error}
    assert of_sizes == wrong, errors


@pytest.mark.slow
def test_ratio_that_makes_a_learning_rate_absurd(here):
    overrides = ["optimizer.lr=1", "parameter_groups.lr_ratios={norm: 1000}"]
    _, (error,) = found_by_both("full_finetune", *overrides)
    assert error.startswith("parameter_groups.lr_ratios: ") and "1000" in error


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        pytest.param(["tasks=[no_such_task]"], "tasks", marks=pytest.mark.weekly),  # imports the harness
        (["limit=0.5"], "limit"),
        (["log_samples=true"], "log_samples"),
        (["dataset.path=null", "score=rewarding.length"], "score"),
        (["out=model"], "out"),
        (["out=new/folder/results.json"], ""),
        (["dataset.path=prompts.jsonl", "score=rewarding.length"], ""),
    ],
)
def test_evaluation_settings(overrides, key, here):
    _, errors = found_by_both("evaluate", *overrides)
    assert [error.partition(":")[0] for error in errors] == [key] * bool(key)
    assert not (here / "new").exists()


@pytest.mark.slow
def test_group_and_key_in_it_are_both_wrong(here):
    require_agreement("ppo_finetune", "parallel=99999999999999999999", "parallel.auto=${.}")


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", ["full_finetune", "distill", "ppo_finetune", "evaluate"])
def test_text_that_is_too_long_for_a_file_name(recipe, here):
    for key in keys(recipe):
        wrong = f"{key}={'x' * 300}"
        if not config.read(*recipe_of(recipe, settings(recipe, wrong)))[1]:  # otherwise its type is reported
            require_agreement(recipe, wrong)


@pytest.mark.weekly
def test_many_random_wrong_values(here):
    assert draw_and_check(seconds=600, most=60) == 60
