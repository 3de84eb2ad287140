"""A copied recipe may rename its settings: it runs, and the verbs that inspect it first are right."""

import json
import re
import sys
from pathlib import Path

import pytest
from copied_recipe import exit_status
from helpers import weekly_but
from omegaconf import OmegaConf

from tune import cli

RECIPES = (
    "full_finetune", "lora_finetune", "pipeline_finetune", "preference_finetune", "reward_finetune", "distill", "grpo",
    "ppo_finetune", "evaluate",
)  # fmt: skip
REWARD = "def length(row, completion):\n    return float(len(completion) % 5)\n"


@pytest.fixture
def here(checkpoint: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("rewarding.py").write_text(REWARD)
    Path("model").symlink_to(checkpoint)
    Path("chats.jsonl").symlink_to(chats)
    pairs = ({"instruction": word, "chosen": f"{word} sat", "rejected": "no"} for word in ("cat", "dog", "mat", "rug"))
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("cat", "dog", "mat")))
    return tmp_path


def values(recipe: str) -> dict[str, object]:
    """Return the settings of a short run."""
    overrides: dict[str, object] = {
        "model.path": "model",
        "dataset.path": "chats.jsonl",
        "device": "cpu",
    }
    if recipe == "evaluate":
        return overrides | {"dtype": "fp32"}
    overrides |= {"compute.dtype": "fp32", "compute.master_dtype": "fp32"}
    overrides |= {"max_steps": 1, "output_dir": "run", "micro_batch_size": 2}
    if recipe in ("grpo", "ppo_finetune"):
        overrides |= {"dataset.path": "prompts.jsonl", "reward": "rewarding.length", "prompts_per_step": 2}
        return overrides | {"sampling.max_new_tokens": 4, "max_prompt_len": 32}
    overrides |= {"global_batch_size": 4, "max_seq_len": 128}
    if recipe in ("preference_finetune", "reward_finetune"):
        overrides |= {"dataset.path": "pairs.jsonl"}
    return overrides | ({"teacher.path": "model", "teacher.dtype": "fp32"} if recipe == "distill" else {})


def rename(recipe: str, keys: list[str]) -> None:
    """Copy a recipe and rename these settings in both files."""
    cli.main(["cp", recipe, "mine.py", "--force"])
    script, text = (Path(f"mine.{suffix}").read_text() for suffix in ("py", "yaml"))
    for key in keys:
        script = re.sub(rf"\bcfg\.{key}\b", f"cfg.my_{key}", script)
        text = re.sub(rf"^{key}:", f"my_{key}:", text, flags=re.MULTILINE)
        text = re.sub(rf"\$\{{{key}\b", f"${{my_{key}", text)
    Path("mine.py").write_text(script)
    Path("mine.yaml").write_text(text)


def settings(recipe: str, keys: list[str]) -> list[str]:
    items = values(recipe).items()
    return [f"{'my_' if key.split('.')[0] in keys else ''}{key}={value}" for key, value in items]


def planned(capsys: pytest.CaptureFixture[str], *run: str) -> dict[str, object]:
    """Return the planned memory and time."""
    capsys.readouterr()
    assert exit_status("plan", *run, "--device", "cpu", "--json") in (0, None)
    plan = json.loads(capsys.readouterr().out)
    return {name: plan[name] for name in ("memory_gib", "seconds", "tokens_per_step", "steps")}


def top_level(recipe: str) -> list[str]:
    file = Path(__file__).parents[2] / "configs" / f"{recipe}.yaml"
    return [str(key) for key in OmegaConf.load(file)]


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", weekly_but(["full_finetune"], RECIPES))
def test_all_settings_renamed(recipe: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = top_level(recipe)
    rename(recipe, keys)
    assert exit_status("validate", "mine.py", *settings(recipe, keys)) == 0
    if recipe != "evaluate":
        assert planned(capsys, "mine.py", *settings(recipe, keys)) == planned(capsys, recipe, *settings(recipe, []))
    assert exit_status("run", "mine.py", *settings(recipe, keys)) == 0, capsys.readouterr().err


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", ["full_finetune", "preference_finetune", "ppo_finetune", "evaluate"])
def test_each_setting_renamed(recipe: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tune validate` finds no error. It does not import the copy, so one process checks all of them."""
    # `value` tells validate about PPO's second model, whose parameters have their own learning rate.
    keys = [key for key in top_level(recipe) if key != "value"]
    for key in keys if recipe == "full_finetune" else keys[::3]:  # the other recipes have most settings in common
        rename(recipe, [key])
        assert exit_status("validate", "mine.py", *settings(recipe, [key])) == 0, (key, capsys.readouterr().out)
        reads_data = key in ("dataset", "tokenizer", "max_seq_len", "packed", "seed", "model")
        for verb in ("preview", "prepare") if reads_data and "tokenizer" in top_level(recipe) else ():
            assert exit_status(verb, "mine.py", *settings(recipe, [key])) in (0, 2), (key, verb)


DELETED = {  # by group: its lines in the script, and their replacements
    "evaluate": [
        ("distributed, optimizers\n", "distributed, evaluation, optimizers\n"),
        ("instantiate(cfg.evaluate, run,", "evaluation.Evaluator(run,"),
    ],
    "compute": [
        ("model, world, **cfg.compute)", "model, world)"),
        ("        pad_packed=bool(cfg.compute.compile),  # compiled blocks want one shape\n", ""),
    ],
    "parallel": [("(cfg.device, **cfg.parallel)", "(cfg.device)")],
    "trackers": [(", trackers=cfg.trackers)", ")")],
    "parameter_groups": [(", **cfg.parameter_groups)", ")")],
    "loss": [
        ("distributed, evaluation, optimizers\n", "distributed, evaluation, losses, optimizers\n"),
        ("instantiate(cfg.loss)", "losses.LinearCrossEntropy()"),
    ],
    "checkpointer": [("instantiate(\n        cfg.checkpointer, run,", "checkpointers.Checkpointer(\n        run,")],
}


@pytest.mark.weekly
def test_groups_deleted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Delete groups from both files: the functions and classes that they went to have the same defaults."""
    cli.main(["cp", "full_finetune", "mine.py"])
    script, text = (Path(f"mine.{suffix}").read_text() for suffix in ("py", "yaml"))
    for group, lines in DELETED.items():
        for before, after in lines:
            assert script.count(before) == 1, before
            script = script.replace(before, after)
        text = re.sub(rf"^{group}:.*\n(?:[ #].*\n)*?(?=\S|\n|\Z)", "", text, flags=re.MULTILINE)
    Path("mine.py").write_text(script)
    Path("mine.yaml").write_text(text)
    assert not [group for group in DELETED if f"cfg.{group}" in script or re.search(rf"^{group}:", text, re.MULTILINE)]
    own = [
        each for each in settings("full_finetune", []) if not each.startswith(tuple(f"{group}." for group in DELETED))
    ]
    assert exit_status("validate", "mine.py", *own) == 0, capsys.readouterr().out
    assert planned(capsys, "mine.py", *own)["memory_gib"] == planned(capsys, "full_finetune", *own)["memory_gib"]
    assert exit_status("run", "mine.py", *own) == 0, capsys.readouterr().err


@pytest.mark.weekly
@pytest.mark.parametrize(
    "group", ["parallel", "compute", "parameter_groups", "evaluate", "checkpointer", "loss", "schedule"]
)
def test_settings_of_a_group_deleted(group: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A group without its settings uses the defaults of its function or class."""
    cli.main(["cp", "full_finetune", "mine.py"])
    text = Path("mine.yaml").read_text()
    whole = re.search(rf"^{group}:\n((?:  .*\n)+)", text, flags=re.MULTILINE)
    assert whole
    kept = [line for line in whole[1].splitlines() if line.startswith(("  _component_:", "  compile:"))]
    short = f"{group}:\n" + "".join(f"{line}\n" for line in kept) if kept else f"{group}: {{}}\n"
    Path("mine.yaml").write_text(text.replace(whole[0], short))
    own = [each for each in settings("full_finetune", []) if not each.startswith(f"{group}.")]
    assert exit_status("validate", "mine.py", *own) == 0, capsys.readouterr().out
