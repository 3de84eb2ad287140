"""Runs that end early: no bad step is saved, and a step reported as saved is on disk."""

import importlib
import json
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tune import config, evaluation, loggers
from tune.checkpointers import checkpointer
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.run import Run, training_run

EVALUATE = "tune.evaluation.evaluator.evaluate"

pytestmark = pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])


@pytest.fixture
def train(checkpoint, chats, tmp_path):
    def train(recipe, *overrides):
        settings = [
            f"model.path={checkpoint}", f"dataset.path={chats}", f"output_dir={tmp_path}", "max_seq_len=128",
            "device=cpu", "compute.dtype=fp32", "global_batch_size=2", "max_steps=4", *overrides,
        ]  # fmt: skip
        recipe.main(config.load(recipe.__name__, settings))

    return train


@pytest.fixture
def closed(monkeypatch):
    """A list that gets an entry when the loggers of a run are closed."""
    closed, open_sinks = [], training_run.open_sinks

    class Watched(loggers.Sink):
        def close(self):
            closed.append("closed")

    monkeypatch.setattr(training_run, "open_sinks", lambda *arguments: [*open_sinks(*arguments), Watched()])
    return closed


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["1.0", "null"])
def test_infinite_gradient_of_a_finite_loss_stops_the_run(recipe, clip, train, closed, monkeypatch, tmp_path):
    recipe, calls, models = importlib.import_module(recipe), [], []
    loss_of, check = LinearCrossEntropy.__call__, training_run.check_forward

    def overflowing(loss_fn, hidden, *others, **softcap):
        calls.append(hidden)
        if len(calls) == 5:  # the first of step 3
            hidden.register_hook(lambda gradient: gradient * torch.inf)
        return loss_of(loss_fn, hidden, *others, **softcap)

    monkeypatch.setattr(LinearCrossEntropy, "__call__", overflowing)
    monkeypatch.setattr(training_run, "check_forward", lambda model, *_: models.append(model) or check(model))
    with pytest.raises(TuneError, match=r"grad_norm is (inf|nan) at step 3"):
        train(recipe, "checkpointer.every=1", "checkpointer.async=false", f"max_grad_norm={clip}")
    assert closed == ["closed"]
    assert all(parameter.isfinite().all() for parameter in models[-1].parameters())
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert checkpoints(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.slow
def test_interrupted_run_reports_a_step_only_once_saved(recipe, train, closed, chats, monkeypatch, tmp_path):
    recipe, asked, messages = importlib.import_module(recipe), SimpleNamespace(requested=False, end=lambda: False), []
    save, log, info = checkpointer.dcp.save, Run.log, Run.info

    def slow(*args, **kwargs):
        time.sleep(0.5)
        return save(*args, **kwargs)

    def interrupting(run, step, *measured):
        log(run, step, *measured)
        asked.requested = step == 1

    def record_checkpoints(run, message):
        messages.append((message, checkpoints(tmp_path)))
        info(run, message)

    monkeypatch.setattr(training_run, "Interrupt", lambda: asked)
    monkeypatch.setattr(checkpointer.dcp, "save", slow)
    monkeypatch.setattr(Run, "log", interrupting)
    monkeypatch.setattr(Run, "info", record_checkpoints)
    with pytest.raises(SystemExit) as end:
        train(recipe, "checkpointer.every=null", f"dataset.validation={chats}", "evaluate.every=1")
    assert end.value.code == 130
    assert closed == ["closed"]
    assert [saved for message, saved in messages if "step 2 is saved" in message] == [["step-00000002"]]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], "validation_loss" in line) for line in lines] == [
        (1, True),
        (2, False),
    ]  # no time to validate


@pytest.mark.weekly
def test_failed_final_validation_is_repeated_at_the_next_start(recipe, train, monkeypatch, tmp_path, chats):
    recipe, validated = importlib.import_module(recipe), [f"dataset.validation={chats}", "evaluate.every=null"]
    train(recipe, f"output_dir={tmp_path / 'whole'}", *validated)
    evaluate = evaluation.evaluate
    with monkeypatch.context() as failing:
        failing.setattr(EVALUATE, mock.Mock(side_effect=OSError("a disk of the network")))
        with pytest.raises(OSError, match="network"):
            train(recipe, *validated)
    assert checkpoints(tmp_path) == ["step-00000004"]
    count = mock.Mock(side_effect=evaluate)
    monkeypatch.setattr(EVALUATE, count)
    for _ in range(2):
        train(recipe, *validated)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        whole = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
        names = ("step", "loss", "grad_norm", "lr", "validation_loss")
        assert [[line.get(name) for name in names] for line in lines] == [
            [line.get(name) for name in names] for line in whole
        ]
    assert count.call_count == 1  # the third start has nothing left to do
