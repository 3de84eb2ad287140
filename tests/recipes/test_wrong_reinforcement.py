"""Wrong rewards, models, environments and settings of grpo and ppo_finetune: each is reported without a traceback."""

import json
import shutil

import grpo
import ppo_finetune
import pytest
from helpers import save_checkpoint
from recipes.test_grpo import requests  # noqa: F401
from recipes.test_rewards import reward_model

HERE = "recipes.test_wrong_reinforcement"


def good(row, completion):
    return completion.count("a")


def of_one_argument(completion):
    return 1.0


def gives_none(row, completion):
    return None


def fails(row, completion):
    return row["no such column"]


def gives_nan(row, completion):
    return float("nan")


class TooFew:
    def scores(self, episodes, tokenizer, world):
        return [1.0]


class NoList:
    def scores(self, episodes, tokenizer, world):
        return 3


class FailingJudge:
    def scores(self, episodes, tokenizer, world):
        raise ConnectionError("no answer")


class Unready:
    def __init__(self):
        raise RuntimeError("no judge")


class NoStep:
    def start(self, row):
        pass


class NotMade(NoStep):
    def __init__(self):
        raise ConnectionError("no server")

    def step(self, message):
        return 1.0, [], True


class Pair(NoStep):
    def step(self, message):
        return 1.0, True


class TextAsReward(NoStep):
    def step(self, message):
        return "good", [], True


class TextAsMessages(NoStep):
    def step(self, message):
        return 1.0, "Once more!", False


class FailingStep(NoStep):
    def step(self, message):
        raise KeyError("secret")


def unwanted(row):
    return False


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    """Models other than the policy, by name."""
    at = tmp_path_factory.mktemp("models")
    reward_model(at / "two_labels", num_labels=2)
    reward_model(at / "other_reward")
    save_checkpoint(at / "other_tokenizer")
    save_checkpoint(at / "few_rows", vocab_size=280)
    for name in ("other_reward", "other_tokenizer"):
        file = at / name / "tokenizer.json"
        file.write_text((checkpoint / "tokenizer.json").read_text().replace("<|im_start|>", "<|turn|>"))
    shutil.copyfile(checkpoint / "tokenizer.json", at / "two_labels" / "tokenizer.json")
    paths = {"language": checkpoint, "nowhere": at / "nowhere", **{folder.name: folder for folder in at.iterdir()}}
    (at / "texts.jsonl").write_text("".join(json.dumps({"prompt": f"{number} and"}) + "\n" for number in range(20)))
    return paths | {"texts": at / "texts.jsonl"}


REWARD_MODEL = "reward={{_component_: tune.generation.RewardModel, path: {%s}}}"
WRONG_TYPE = "reward={{_component_: tune.generation.RewardModel, path: {other_reward}, dtype: fp64}}"
BOTH = {
    "raises": (
        [f"reward={HERE}.fails"],
        "reward: fails fails on",
        "KeyError: 'no such column' (test_wrong_reinforcement.py:",
    ),
    "cannot be made": ([f"reward={HERE}.Unready"], "reward: Unready cannot be ", "RuntimeError: no judge"),
    "NaN": ([f"reward={HERE}.gives_nan"], "reward: gives_nan returned nan for", "finite number"),
    "None": ([f"reward={HERE}.gives_none"], "reward: gives_none returned None for", "finite number"),
    "one argument": ([f"reward={HERE}.of_one_argument"], "reward: ", "of_one_argument"),
    "not importable": (["reward=no_such_module.good"], "reward: there is no module 'no_such_module'"),
    "no dotted path": (["reward=good"], "'good' is not the dotted path of a function or class. Include its module"),
    "too few scores": ([f"reward={HERE}.TooFew"], "reward: TooFew returned [1.0] for 16 completions"),
    "no list of scores": ([f"reward={HERE}.NoList"], "reward: NoList returned 3 for 16 completions"),
    "a judge that fails": ([f"reward={HERE}.FailingJudge"], "reward: FailingJudge fails: ConnectionError: no answer"),
    "two labels": ([REWARD_MODEL % "two_labels"], "the model scores 2 labels, but a reward is one number"),
    "no reward model": ([REWARD_MODEL % "language"], "reward_finetune"),
    "a reward model's tokenizer": ([REWARD_MODEL % "other_reward"], "reward.path: ", "has a different tokenizer from"),
    "no folder of a reward model": ([REWARD_MODEL % "nowhere"], "reward.path: ", "nowhere does not exist"),
    "another reference": (["kl=0.1", "reference={other_tokenizer}"], "reference: ", "has a different tokenizer from"),
    "a reference of few rows": (["kl=0.1", "reference={few_rows}"], "reference: ", "has rows for 280 tokens"),
    "a reward model as reference": (["kl=0.1", "reference={other_reward}"], "reference: ", "is a reward model: it"),
    "no reference": (["kl=0.1", "reference={nowhere}"], "nowhere is neither adapter_off nor "),
    "a reference of preferences": (["kl=0.1", "reference=precomputed"], "precomputed is neither adapter_off nor "),
    "no adapter": (["kl=0.1", "reference=adapter_off"], "reference: adapter_off needs an adapter"),
    "no rewards": (["reward=[]"], "reward: [] "),
    "a wrong argument": ([WRONG_TYPE], "reward.dtype: 'fp64' is not one of bf16, fp32"),
    "a loss of tokens": (
        ["loss._component_=tune.losses.ForwardKL"],
        "loss._component_: tune.losses.ForwardKL takes other arguments than tune.",
    ),
    "a head that scores": (["model.head=score"], "model.head: 'score' "),
    "the recipe's own": (["sampling.seed=3"], "sampling.seed: the recipe passes this argument"),
    "the best of a few rows": (["checkpointer.keep_best=reward/good"], "keep_best: reward/good "),
    "greedy": (["sampling.temperature=0"], "sampling.temperature: 0 is not a positive number"),
    "negative kl": (["kl=-1"], "kl: -1 is below 0"),
    "no room": (["sampling.max_new_tokens=9999"], "tokens and max_new_tokens is 9999, together more than the"),
    "no room in max_len": (["sampling.max_len=16"], "together more than max_len (16). Lower one by"),
    "empty stop string": (["sampling.stop_strings=['']"], "sampling.stop_strings: must not be empty"),
    "a stop string": (
        ["sampling.stop_strings=abc"],
        "sampling.stop_strings: 'abc' is not a list (each a string).",
    ),
    "a reward model as policy": (
        ["model.path={other_reward}"],
        "model.path: ",
        "is a reward model",
        "as reward.path of a",
    ),
    "a reward and keys": (["reward.path=x"], f"reward: is given as '{HERE}.good' and by its keys (path)"),
    "no prompt wanted": ([f"dataset.filter={HERE}.unwanted"], "no prompt is left of 22 rows", "left out by"),
    "no prompt fits": (["max_prompt_len=2"], "no prompt is left of 22 rows", "longer than max_prompt_len"),
    "too many prompts": (["prompts_per_step=99"], "prompts_per_step=99 exceeds the 22"),
    "no updates": (["updates=0"], "updates: 0 is below 1"),
    "another loss": (["loss._component_=tune.losses.DPO"], "tune.losses.DPO compares log-probs of answers"),
}
ENVIRONMENTS = {
    "NoStep": ("has no step: it must be a class with start(row)",),
    "good": ("has no start and no step: it must be a class with start(row)",),
    "NotMade": ("environment: cannot be created: ConnectionError: no server",),
    "Pair": ("environment: step returned (1.0, True); it must return (reward, messages, done)",),
    "TextAsReward": ("environment: step returned the reward 'good'; it must return a finite number",),
    "TextAsMessages": ("environment: the messages of step",),
    "FailingStep": ("environment: step fails on ", "KeyError: 'secret'"),
}
OF_GRPO = {
    "group of one": (["group_size=1"], "group_size: 1 is below 2"),
    "texts": ([f"environment={HERE}.Pair", "dataset.path={texts}"], "environment: prompts must be conversations"),
    "no turns": (["max_turns=0"], "max_turns: 0 is not a positive integer"),
    **{
        name: ([f"environment={HERE}.{name}", "max_turns=2", "sampling.stop_strings=[a,e,n,r,s,t,l]"], *messages)
        for name, messages in ENVIRONMENTS.items()
    },
}
OF_PPO = {
    "another value tokenizer": (["value.path={other_tokenizer}"], "value.path: ", "has a different tokenizer from"),
    "a value model of few rows": (["value.path={few_rows}"], "value.path: ", "has rows for 280 tokens"),
    "a value model of two labels": (["value.path={two_labels}"], "the model scores 2 labels"),
    "no value model": (["value.path={nowhere}"], "value.path: ", "nowhere does not exist"),
    "a value model of tokens": (["value.head=tokens"], "Set value.head=score"),
    "no samples": (["samples_per_prompt=0"], "samples_per_prompt: 0 is not a positive integer"),
    "negative weight": (["value_weight=-1"], "value_weight: -1 is below 0"),
    "no room for values": (["value_clip=0"], "value_clip: 0 is below"),
    "lambda": (["gae_lambda=2"], "gae_lambda: 2 is not a number from 0 to 1"),
    "an environment": ([f"environment={HERE}.Pair"], "environment: is not a setting. It is one of grpo: use that"),
}
CASES = [
    *((recipe, case) for recipe in (grpo, ppo_finetune) for case in BOTH.items()),
    *((grpo, case) for case in OF_GRPO.items()),
    *((ppo_finetune, case) for case in OF_PPO.items()),
]


@pytest.fixture
def settings(checkpoint, requests, tmp_path):  # noqa: F811
    return [
        f"model.path={checkpoint}", f"dataset.path={requests}", f"output_dir={tmp_path / 'run'}", "max_prompt_len=64",
        f"reward={HERE}.good", "sampling.max_new_tokens=12", "device=cpu", "compute.dtype=fp32", "max_steps=1",
    ]  # fmt: skip


def counts(recipe):
    return ["prompts_per_step=4", "group_size=4"] if recipe is grpo else ["prompts_per_step=16"]


# Errors that only a call of the judge or the environment shows.
NOT_BEFORE = {"too few scores", "no list of scores", "a judge that fails"}
BEFORE_WEIGHTS = {"no room", "texts", "another reference", "a reference of few rows", "a reward model as reference"}
NOT_BEFORE |= {name for name in ENVIRONMENTS if name not in ("NoStep", "good")}


# One of each kind: code that fails, a folder of another kind, a value, rows.
QUICK = {"grpo": {"raises", "no prompt fits"}, "ppo_finetune": set()}


def cases(names):
    """Return all cases; those that are not in `names`, by recipe, are weekly."""
    return [
        pytest.param(
            recipe, case, id=f"{recipe.__name__} {case[0]}",
            marks=() if case[0] in names[recipe.__name__] else pytest.mark.weekly,
        )
        for recipe, case in CASES
    ]  # fmt: skip


def overrides_and_messages(case, folders):
    overrides, *messages = case[1]
    return [override.format(**folders) if "{" in override else override for override in overrides], messages


# Cases that both methods refuse are quick in one of them.
@pytest.mark.parametrize(
    ("recipe", "case"), cases({"grpo": {*[*BOTH][::4], *[*OF_GRPO][::4]}, "ppo_finetune": {*[*OF_PPO][::4], "raises"}})
)
def test_run_refuses(recipe, case, settings, folders, run_recipe, capsys, monkeypatch):
    overrides, messages = overrides_and_messages(case, folders)
    if case[0] in BEFORE_WEIGHTS:
        monkeypatch.delattr("tune.checkpointers.Pretrained.load")
    assert run_recipe([*settings, *counts(recipe), *overrides], recipe) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert all(message in shown for message in messages), shown


@pytest.mark.weekly
@pytest.mark.parametrize(("recipe", "case"), cases(QUICK))
def test_tune_validate_refuses(recipe, case, settings, folders, told):
    if case[0] in NOT_BEFORE:
        return
    overrides, messages = overrides_and_messages(case, folders)
    errors = " ".join(told(recipe.__name__, [*settings, *counts(recipe), *overrides]).split())
    assert [message for message in messages if message not in errors] == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [grpo, ppo_finetune])
def test_warning_about_a_tokenizer_without_eos(recipe, checkpoint, settings, run_recipe, tmp_path, capsys):
    """Without it, every completion would have the maximum length for no visible reason."""
    folder = shutil.copytree(checkpoint, tmp_path / "endless")
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: fields[key] for key in fields if not key.startswith("eos_token")}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    )
    run_settings = [*settings, *counts(recipe), f"model.path={folder}"]
    assert run_recipe(run_settings, recipe) == 0
    assert "warning: the tokenizer has no eos_token, so nothing ends a completion" in capsys.readouterr().out
    assert run_recipe([*run_settings, f"output_dir={tmp_path / 'stopped'}", "sampling.stop_strings=[a]"], recipe) == 0
    assert "nothing ends" not in capsys.readouterr().out
