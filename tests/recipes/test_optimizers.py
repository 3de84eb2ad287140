"""Optimizers by name, in both recipes: on two processes, resumed exactly, and updating in the backward pass."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from edited_recipes import run_edited
from helpers import HANGS, run_processes, save_checkpoint, weekly_but
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from update_in_backward import in_backward

from tune import config
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.run import training_run

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")

# Settings, and the tolerance between 1 and 2 processes. Low-bit states are quantized in blocks of a process's shard, if
# it has at least 4,096 elements; Muon multiplies in bf16.
OPTIMIZERS = {
    "AdamW": ([], 1e-5),
    "SGD": (["optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1", "optimizer.momentum=0.9"], 1e-5),
    "Adafactor": (["optimizer._component_=tune.optimizers.Adafactor", "optimizer.lr=1e-2"], 1e-5),
    "Muon": (["optimizer._component_=tune.optimizers.Muon"], 1e-4),
    "AdamW8bit": (["optimizer._component_=torchao.optim.AdamW8bit"], 1e-3),
    "AdamW4bit": (["optimizer._component_=torchao.optim.AdamW4bit"], 1e-3),
    "AdamWFp8": (["optimizer._component_=torchao.optim.AdamWFp8"], 1e-3),
}
LOW_BIT = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
SCHEDULES = {
    "constant": ["schedule._component_=tune.optimizers.constant"],
    "linear": ["schedule._component_=tune.optimizers.linear"],
    "cosine": ["schedule._component_=tune.optimizers.cosine", "schedule.min_ratio=0"],
    "cosine with minimum": ["schedule._component_=tune.optimizers.cosine"],
    "WSD": ["schedule._component_=tune.optimizers.warmup_stable_decay", "schedule.decay=0.5"],
    "inverse square root": ["schedule._component_=tune.optimizers.inverse_square_root", "schedule.warmup=2"],
}
# Adapters large enough for low-bit states.
RECIPES = {
    "full_finetune": ["optimizer.lr=5e-4"],
    "lora_finetune": ["optimizer.lr=1e-3", "adapter.rank=64", "adapter.target_modules=[gate_proj,up_proj,down_proj]"],
}


@pytest.fixture(autouse=True)
def uncompiled():
    """Keep torchao's optimizers from compiling, which is slow."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model with matrices of at least 8,192 elements: two processes quantize low-bit states, too."""
    return save_checkpoint(tmp_path_factory.mktemp("model"), hidden_size=128, num_hidden_layers=2)


@pytest.fixture
def common(checkpoint, chats):
    return [
        f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=128", "device=cpu", "compute.dtype=fp32",
        "global_batch_size=8", "max_steps=4", "schedule.warmup=2", "checkpointer.every=2", "checkpointer.keep=null",
    ]  # fmt: skip


def curve(run):
    """Return the metrics of each step that do not depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines]


def losses(run):
    return [loss for _, loss, _, _ in curve(run)]


def train(recipe, folder, *overrides):
    run_edited(recipe, [*overrides, f"output_dir={folder}"])
    return curve(folder)


def near(ours, theirs):
    """Return whether two curves are equal up to rounding."""
    return np.array(ours) == pytest.approx(np.array(theirs), rel=1e-5)


def state(checkpoint, folder):
    dcp_to_torch_save(checkpoint, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", weekly_but(["AdamW", "AdamW8bit"], OPTIMIZERS))
def test_resumed_run_equals_the_uninterrupted_one(name, recipe, common, told, tmp_path):
    settings = [*common, *RECIPES[recipe], *OPTIMIZERS[name][0]]
    whole = train(recipe, tmp_path / "whole", *settings)
    middle, end = (tmp_path / "whole" / "checkpoints" / f"step-{step:08d}" for step in (2, 4))
    again = [*settings, f"resume={middle}", f"output_dir={tmp_path / 'resumed'}"]
    assert told(recipe, again) == ""
    resumed = train(recipe, tmp_path / "resumed", *again)
    assert resumed == whole[2:]
    ours, theirs = (state(run, tmp_path) for run in (tmp_path / "resumed" / "checkpoints" / end.name, end))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", ["full_finetune"])
def test_two_processes(recipe, common, told_to, tmp_path):
    """They match one process, which can resume their runs. Resumed and in-backward runs match bitwise."""
    changed, unclipped = in_backward(recipe, tmp_path / "changed"), [*common, *RECIPES[recipe], "micro_batch_size=4"]
    common = [*unclipped, "max_grad_norm=null"]
    variants = {}
    for name, (settings, _) in OPTIMIZERS.items():
        middle = tmp_path / "2" / name / "checkpoints" / "step-00000002"
        variants |= {
            name: settings,
            f"{name}, resumed": [*settings, f"resume={middle}"],
        }
        if name in LOW_BIT:  # sharded within rows and blocks
            every = ["checkpointer.every=1", "parallel.tp=2"]
            variants[f"{name}, resumed, shared"] = [*settings, f"resume={middle}", *every]
            again = tmp_path / "2" / f"{name}, resumed, shared" / "checkpoints" / "step-00000003"
            variants[f"{name}, resumed twice"] = [*settings, f"resume={again}"]
    run_processes(RUN_VARIANTS, 2, recipe, str(tmp_path / "2"), json.dumps(common), json.dumps(variants))
    each_in_backward = {f"{name}, in backward": settings for name, (settings, _) in OPTIMIZERS.items()}
    arguments = [str(tmp_path / "2"), json.dumps(unclipped), json.dumps(each_in_backward)]
    run_processes(RUN_VARIANTS, 2, changed, *arguments)
    lines = [[recipe, *common, *settings, f"output_dir={tmp_path / name}"] for name, settings in variants.items()]
    assert {*told_to(2, *lines)} == {""}
    for name, (settings, tolerance) in OPTIMIZERS.items():
        two = curve(tmp_path / "2" / name)
        train(recipe, tmp_path / name, *common, *settings)
        assert losses(tmp_path / "2" / name) == pytest.approx(losses(tmp_path / name), rel=tolerance)
        assert curve(tmp_path / "2" / f"{name}, resumed") == two[2:]
        assert losses(tmp_path / "2" / f"{name}, in backward") == losses(tmp_path / "2" / name)
        for resumed, steps in (("resumed, shared", slice(2, None)), ("resumed twice", slice(3, None))):
            if name in LOW_BIT:
                shared = losses(tmp_path / "2" / f"{name}, {resumed}")
                assert shared == pytest.approx(losses(tmp_path / name)[steps], rel=tolerance), (name, resumed)
        middle = f"resume={tmp_path / '2' / name / 'checkpoints' / 'step-00000002'}"
        train(recipe, tmp_path / f"{name}, continued", *common, *settings, middle)
        assert losses(tmp_path / f"{name}, continued") == pytest.approx(losses(tmp_path / name)[2:], rel=tolerance)


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("name", weekly_but(["cosine", "WSD"], SCHEDULES))
def test_schedules_resume_exactly(name, common, tmp_path):
    settings = [*common, *RECIPES["full_finetune"], "max_steps=6", *SCHEDULES[name]]
    whole = train("full_finetune", tmp_path / "whole", *settings)
    assert len({lr for _, _, _, lr in whole}) > 2
    for step in (2, 4):
        middle = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        assert train("full_finetune", tmp_path / str(step), *settings, f"resume={middle}") == whole[step:]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_update_in_backward_equals_update_in_step(recipe, common, tmp_path):
    """A run that starts with one may resume with the other."""
    changed, common = in_backward(recipe, tmp_path / "changed"), [*common, *RECIPES[recipe], "micro_batch_size=8"]
    in_step = train(recipe, tmp_path / "step", *common, "max_grad_norm=null")
    at_once = train(changed, tmp_path / "backward", *common)
    assert near(at_once, in_step)
    middle = tmp_path / "step" / "checkpoints" / "step-00000002"
    resumed = train(changed, tmp_path / "resumed", *common, f"resume={middle}")
    assert near(resumed, at_once[2:])


def test_update_in_backward_requires_one_micro_batch(common, tmp_path):
    changed = in_backward("full_finetune", tmp_path / "changed")
    with pytest.raises(TuneError, match=r"second gradient .* micro_batch_size"):
        train(changed, tmp_path / "run", *common, "micro_batch_size=2")
    assert not [*(tmp_path / "run" / "checkpoints").glob("step-*")]


@pytest.mark.slow
def test_no_update_in_backward_on_a_non_finite_loss(common, tmp_path, monkeypatch):
    models, weights = [], []
    loss_of, check = LinearCrossEntropy.__call__, training_run.check_forward

    def spoiled(*operands, **softcap):
        weights.append({name: tensor.clone() for name, tensor in models[-1].state_dict().items()})
        return loss_of(*operands, **softcap) * (torch.nan if len(weights) == 3 else 1)

    monkeypatch.setattr(LinearCrossEntropy, "__call__", spoiled)
    monkeypatch.setattr(training_run, "check_forward", lambda model, *_: models.append(model) or check(model))
    changed = in_backward("full_finetune", tmp_path / "changed")
    with pytest.raises(TuneError, match="loss is nan at step 3"):
        train(changed, tmp_path / "run", *common, "micro_batch_size=8")
    torch.testing.assert_close(models[-1].state_dict(), weights[-1], rtol=0, atol=0)


@pytest.mark.slow
def test_lower_learning_rate_applies_from_the_checkpoint_on(common, tmp_path):
    settings = [*common, "schedule._component_=tune.optimizers.constant", "schedule.warmup=0"]
    train("full_finetune", tmp_path / "run", *settings, "optimizer.lr=1e-3")
    middle = tmp_path / "run" / "checkpoints" / "step-00000002"
    resumed = train("full_finetune", tmp_path / "resumed", *settings, "optimizer.lr=5e-4", f"resume={middle}")
    assert [lr for _, _, _, lr in resumed] == [5e-4, 5e-4]


@pytest.mark.slow
def test_adapters_do_not_resume_on_another_base(checkpoint, common, tmp_path):
    base = shutil.copytree(checkpoint, tmp_path / "base")
    settings = [*common, *RECIPES["lora_finetune"], f"model.path={base}"]
    train("lora_finetune", tmp_path / "run", *settings, "max_steps=2")
    moved = base.rename(tmp_path / "moved")
    settings[-1] = f"model.path={moved}"
    train("lora_finetune", tmp_path / "run", *settings)
    save_checkpoint(tmp_path / "other", hidden_size=128, num_hidden_layers=2, initializer_range=0.04)
    settings[-1] = f"model.path={tmp_path / 'other'}"
    with pytest.raises(TuneError, match=rf"on {moved} with .*; {tmp_path / 'other'} with .* has other weights"):
        train("lora_finetune", tmp_path / "run", *settings, "max_steps=6")


@pytest.mark.weekly
def test_missing_compiler_is_named(common, tmp_path):
    env = os.environ | {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    settings = [*common, "optimizer._component_=torchao.optim.AdamW8bit", f"output_dir={tmp_path / 'run'}"]
    command = [sys.executable, str(config.find_recipe("full_finetune")), *settings]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 2
    assert "C++ compiler" in done.stderr and "g++" in done.stderr and "Traceback" not in done.stderr
