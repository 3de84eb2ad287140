"""A run that is stopped at a step with a due measurement continues as if it had not been stopped."""

import importlib
import json
import os
import shutil
import signal
from pathlib import Path

import full_finetune
import grpo
import lora_finetune
import pytest
import torch
from docs_reader import ROOT, change
from helpers import run_processes
from recipes.test_grpo import requests  # noqa: F401
from safetensors.torch import load_file

from tune import checkpointers

LAST = 8
SECTION = "A schedule that reads the validation loss"


@pytest.fixture
def common(checkpoint, chats):
    return [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"dataset.validation={chats}", "device=cpu",
        "compute.dtype=fp32", "max_seq_len=128", "global_batch_size=4", f"max_steps={LAST}", "evaluate.every=2",
        "optimizer.lr=0.03", "checkpointer.keep_best=validation_loss",
    ]  # fmt: skip


@pytest.fixture
def stop(run_recipe, monkeypatch):
    """Function that runs a recipe and sends it SIGINT in a step."""

    def run(recipe, settings: list[str], last: int) -> None:
        accepts = checkpointers.Checkpointer.accepts

        def interrupted(self, step, *arguments, **values):
            if step == last:
                os.kill(os.getpid(), signal.SIGINT)
            return accepts(self, step, *arguments, **values)

        with monkeypatch.context() as patch:
            patch.setattr(checkpointers.Checkpointer, "accepts", interrupted)
            assert run_recipe(settings, recipe) == 130

    return run


@pytest.fixture
def stopped_at(run_recipe, stop):
    """Function that runs a recipe, stops it in each of these steps, continues it, and returns its folder."""

    def run(recipe, settings: list[str], *steps: int) -> Path:
        for step in steps:
            stop(recipe, settings, step)
        assert run_recipe(settings, recipe) == 0
        return Path(next(setting for setting in settings if "output_dir" in setting).partition("=")[2])

    return run


def values(folder, *prefixes):
    """The metrics of a run that measurements made, by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: {name: value for name, value in line.items() if name.startswith(prefixes)} for line in lines}


def exported(folder):
    (file,) = [*folder.glob("model/model.safetensors"), *folder.glob("adapter/adapter_model.safetensors")]
    return load_file(file)


def best(folder):
    newest = max(folder.glob("checkpoints/*/state.json"), key=str)
    return json.loads(newest.read_text())["best"]


def require_same(parts, whole, *prefixes):
    assert values(parts, *prefixes) == values(whole, *prefixes)
    assert best(parts) == best(whole)
    expected = exported(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported(parts).items())


@pytest.mark.slow
def test_schedule_and_best_see_the_same_values(common, tmp_path, monkeypatch, stopped_at):
    """A schedule that reads the validation loss, in a copy, and keep_best."""
    page = (ROOT / "docs" / "changes.md").read_text().split(f"## {SECTION}\n")[1].split("\n## ")[0]
    shutil.copy(full_finetune.__file__, tmp_path / "late.py")
    shutil.copy(ROOT / "configs" / "full_finetune.yaml", tmp_path / "late.yaml")
    for diff in page.split("```diff\n")[1:]:
        change(diff.split("```")[0].replace("mine.", "late."), tmp_path)
    script = (tmp_path / "late.py").read_text()
    (tmp_path / "late.py").write_text(script.replace('"full_finetune"', '"late"'))
    defaults = (tmp_path / "late.yaml").read_text()
    (tmp_path / "late.yaml").write_text(defaults.replace("  factor: 0.5", "  threshold: 0.5\n  factor: 0.5"))
    monkeypatch.syspath_prepend(tmp_path)
    late = importlib.import_module("late")
    settings = [*common, "schedule.patience=0"]  # with the threshold, the rate falls at most validations
    whole = stopped_at(late, [*settings, f"output_dir={tmp_path / 'whole'}"])
    parts = stopped_at(late, [*settings, f"output_dir={tmp_path / 'parts'}"], 2, 4, 5)
    rates = [step["lr"] for step in values(whole, "lr").values()]
    assert len({*rates}) >= 3  # the schedule read the values
    require_same(parts, whole, "validation_", "lr", "loss", "grad_norm")


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", [full_finetune, lora_finetune])
def test_every_measurement_is_made_up_for(recipe, common, tmp_path, stopped_at):
    """Prompts, general data and patience too. The run ends early at the same step."""
    (tmp_path / "prompts.txt").write_text("the cat\nit was\n")
    (tmp_path / "general.jsonl").write_text('{"text": "the cat sat on the mat and ran"}\n')
    settings = [
        *common, f"evaluate.prompts={tmp_path / 'prompts.txt'}", "evaluate.every=2", "evaluate.max_new_tokens=5",
        f"evaluate.general={tmp_path / 'general.jsonl'}", "checkpointer.patience=1", "checkpointer.every=1",
        "optimizer.lr=0.3", "max_steps=40",
    ]  # fmt: skip
    whole = stopped_at(recipe, [*settings, f"output_dir={tmp_path / 'whole'}"])
    last = max(values(whole))
    assert 2 < last < 40
    for stops in ([2], [last], [2, last]):
        parts = stopped_at(recipe, [*settings, f"output_dir={tmp_path / str(stops)}"], *stops)
        require_same(parts, whole, "validation_", "general_", "loss")
        samples = [(folder / "samples.jsonl").read_text().splitlines() for folder in (whole, parts)]
        assert samples[0] == samples[1] and len(samples[0]) > 4


@pytest.mark.weekly
def test_two_processes_of_which_one_gets_the_signal(common, tmp_path):
    script = Path(__file__).with_name("run_stopped.py")
    settings = [*common, "max_steps=6", "checkpointer.patience=9"]
    for name, stops in (("whole", [0]), ("parts", [2, 4, 0])):
        for step in stops:
            run_processes(script, 2, str(step), *settings, f"output_dir={tmp_path / name}")
    require_same(tmp_path / "parts", tmp_path / "whole", "validation_", "loss")


@pytest.mark.weekly
def test_from_another_folder(common, tmp_path, run_recipe, stop, stopped_at):
    whole = stopped_at(full_finetune, [*common, f"output_dir={tmp_path / 'whole'}"])
    stop(full_finetune, [*common, f"output_dir={tmp_path / 'first'}"], 4)
    again = tmp_path / "again"
    assert run_recipe([*common, f"output_dir={again}", f"resume={tmp_path / 'first'}"]) == 0
    assert {step: line for step, line in values(whole, "validation_").items() if step >= 4} == values(
        again, "validation_"
    )
    assert all(torch.equal(tensor, exported(whole)[name]) for name, tensor in exported(again).items())
    assert "state.json" not in (again / "log.txt").read_text()  # no warning about the other folder's checkpoint


@pytest.mark.weekly
def test_extended_run_counts_its_last_value_once(common, tmp_path, run_recipe):
    """The last step of a run is measured at its end, and again when the run is extended: once for patience."""
    constant = [*common, "schedule._component_=tune.optimizers.constant", "checkpointer.every=2"]
    for folder, ends in (("whole", [LAST]), ("parts", [2, 4, LAST])):
        for end in ends:
            assert run_recipe([*constant, f"max_steps={end}", f"output_dir={tmp_path / folder}"]) == 0
    require_same(tmp_path / "parts", tmp_path / "whole", "validation_", "loss")


@pytest.mark.slow
def test_rewards_of_a_validation(checkpoint, requests, tmp_path, stopped_at):  # noqa: F811
    settings = [
        f"model.path={checkpoint}", "device=cpu", "compute.dtype=fp32", f"dataset.path={requests}", "evaluate.every=2",
        f"dataset.validation={requests}", "max_prompt_len=64", "optimizer.lr=3e-2", "max_steps=6", "epochs=9",
        "reward=recipes.test_grpo.share_of_a", "sampling.max_new_tokens=6", "prompts_per_step=4", "group_size=4",
        "checkpointer.keep_best=validation_reward",
    ]  # fmt: skip
    whole = stopped_at(grpo, [*settings, f"output_dir={tmp_path / 'whole'}"])
    parts = stopped_at(grpo, [*settings, f"output_dir={tmp_path / 'parts'}"], 2, 4)
    require_same(parts, whole, "validation_", "reward")
