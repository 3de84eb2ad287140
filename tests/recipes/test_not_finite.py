"""Steps whose loss is NaN: `checkpointer.on_nan` stops, skips or rolls back."""

import json

import distill
import full_finetune
import grpo
import lora_finetune
import ppo_finetune
import preference_finetune
import pytest
import reward_finetune
import torch
from helpers import run_processes
from recipes.run_variants import __file__ as RUN_VARIANTS
from recipes.test_grpo import requests  # noqa: F401
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tune import distributed
from tune.losses import ClippedPolicy, LinearCrossEntropy

BAD_ROW = 11


class Spoiled(LinearCrossEntropy):
    """A loss that is NaN for the batch with one particular row."""

    def __call__(self, hidden, weight, batch, **options):
        loss = super().__call__(hidden, weight, batch, **options)
        return loss * torch.nan if bool((batch.documents.samples == BAD_ROW).any()) else loss


class SpoiledPolicy(ClippedPolicy):
    """A loss that is NaN for the completions of the second step of 16."""

    def __call__(self, log_probs, sampled, advantages, batch):
        loss, clipped = super().__call__(log_probs, sampled, advantages, batch)
        return loss * torch.nan if bool((batch.documents.samples // 16 == 1).any()) else loss, clipped


@pytest.mark.slow
@pytest.mark.parametrize("way", ["skip", "rollback"])
@pytest.mark.parametrize(
    ("recipe", "counts"), [(grpo, ["group_size=4", "prompts_per_step=4"]), (ppo_finetune, ["prompts_per_step=16"])]
)
def test_nan_ends_the_updates_on_its_completions(recipe, counts, way, run_recipe, checkpoint, requests, tmp_path):  # noqa: F811
    """Otherwise each update would fail or, after a rollback, learn from samples of other weights."""
    settings = [
        f"model.path={checkpoint}", f"dataset.path={requests}", "max_prompt_len=64", *counts, "updates=3", "epochs=3",
        "reward=recipes.test_grpo.share_of_a", "sampling.max_new_tokens=6", "device=cpu", "compute.dtype=fp32",
        "max_steps=3", "checkpointer.every=1", f"checkpointer.on_nan={way}",
        "loss._component_=recipes.test_not_finite.SpoiledPolicy",
    ]  # fmt: skip
    run = tmp_path / "run"
    assert run_recipe([*settings, f"output_dir={run}"], recipe) == 0
    assert [value is None for value in losses(run)] == [False, True, False]
    assert (run / "log.txt").read_text().count("training continues") == 1


METHODS = {
    preference_finetune: ["dataset.path={pairs}", "max_seq_len=256", "reference={tied}"],
    reward_finetune: ["dataset.path={pairs}", "max_seq_len=256", "adapter.rank=4"],
    distill: ["dataset.path={chats}", "max_seq_len=128", "teacher.path={tied}", "on_policy.share=0.5"],
}


@pytest.mark.weekly
@pytest.mark.parametrize("way", [pytest.param("skip", marks=pytest.mark.weekly), "rollback"])
@pytest.mark.parametrize("recipe", METHODS, ids=lambda recipe: recipe.__name__)
def test_nan_gradients_of_every_method(
    recipe, way, run_recipe, checkpoint, tied_checkpoint, pairs, chats, tmp_path, monkeypatch
):
    """A step with NaN gradients keeps the weights, and the run goes on as if it had not happened."""
    common = [setting.format(pairs=pairs, chats=chats, tied=tied_checkpoint) for setting in METHODS[recipe]] + [
        f"model.path={checkpoint}", "device=cpu", "compute.dtype=fp32", "global_batch_size=8", "micro_batch_size=4",
        "checkpointer.every=1", "checkpointer.keep=null", f"checkpointer.on_nan={way}", "max_steps=3",
        "schedule.warmup=0", "optimizer.lr=1e-2", "epochs=3",
    ]  # fmt: skip
    clip, calls = distributed.clip_grad_norm_, []

    def spoiled(parameters, *rest):
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        calls.append(len(calls))
        if calls[-1] == 1:
            parameters[0].grad.fill_(torch.nan)
        return clip(parameters, *rest)

    monkeypatch.setattr(distributed, "clip_grad_norm_", spoiled)
    run = tmp_path / "run"
    assert run_recipe([*common, f"output_dir={run}"], recipe) == 0
    states = [weights(run, step, tmp_path) for step in (1, 2, 3)]
    differs = [any(not torch.equal(state[name], states[0][name]) for name in state) for state in states]
    assert differs == [False, False, True] and None not in losses(run)
    log = (run / "log.txt").read_text()
    assert log.count("grad_norm is nan at step 2") == 1 and "training continues" in log
    monkeypatch.setattr(distributed, "clip_grad_norm_", clip)
    again = tmp_path / "again"
    assert run_recipe([*common, f"resume={run}/checkpoints/step-00000002", f"output_dir={again}"], recipe) == 0
    assert losses(again) == losses(run)[2:]


@pytest.fixture
def common(checkpoint, chats):
    return [
        f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=128", "compute.dtype=fp32", "device=cpu",
        "loss._component_=recipes.test_not_finite.Spoiled", "global_batch_size=8", "micro_batch_size=4",
        "checkpointer.every=2", "checkpointer.keep=null", "optimizer.lr=1e-2", "seed=1",
    ]  # fmt: skip


def losses(run):
    return [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run, step, folder):
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:08d}", folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)["model"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [full_finetune, pytest.param(lora_finetune, marks=pytest.mark.slow)])
def test_one_process(recipe, common, run_recipe, tmp_path):
    runs = {}
    for way in ("skip", "rollback"):
        run = runs[way] = tmp_path / way
        assert run_recipe([*common, f"checkpointer.on_nan={way}", f"output_dir={run}"], recipe) == 0
        assert [value is None for value in losses(run)] == [False, False, False, True, False, False]
        log = (run / "log.txt").read_text()
        weights_now = {"skip": "are unchanged", "rollback": "are restored from step 2"}
        assert "loss is nan at step 4, in a batch of dataset rows" in log
        assert f"The weights {weights_now[way]}; training continues" in log
        again = tmp_path / "again"  # resumed before the bad step
        settings = [*common, f"checkpointer.on_nan={way}", f"output_dir={again / way}"]
        before = run / "checkpoints" / "step-00000002"
        assert run_recipe([*settings, f"resume={before}"], recipe) == 0
        assert losses(again / way) == losses(run)[2:]
    skipped, back = (losses(runs[way]) for way in ("skip", "rollback"))
    assert skipped[:4] == back[:4] and skipped[4] != back[4]
    assert run_recipe([*common, f"output_dir={tmp_path / 'stop'}"], recipe) == 2
    kept, now = (weights(runs["rollback"], step, tmp_path) for step in (2, 4))
    assert kept.keys() == now.keys() and all(torch.equal(kept[name], now[name]) for name in kept)


@pytest.mark.slow
def test_two_processes(common, run_recipe, tmp_path):
    ways = {way: [f"checkpointer.on_nan={way}"] for way in ("skip", "rollback")}
    run_processes(RUN_VARIANTS, 2, "full_finetune", str(tmp_path / "two"), json.dumps(common), json.dumps(ways))
    for way, settings in ways.items():
        assert run_recipe([*common, *settings, f"output_dir={tmp_path / way}"]) == 0
        one, two = losses(tmp_path / way), losses(tmp_path / "two" / way)
        assert [value is None for value in one] == [value is None for value in two]
        assert [value for value in two if value] == pytest.approx([value for value in one if value], rel=1e-5)


@pytest.mark.parametrize("setting", ["optimizer.eps=0", "optimizer.lr=1e38"])
def test_settings_that_make_weights_non_finite_are_refused(setting, inputs, run_recipe, capsys):
    run = inputs.folder / "new"
    assert run_recipe([*inputs.settings(), f"output_dir={run}", setting]) == 2
    assert setting.partition("=")[0] in capsys.readouterr().err
    assert not run.exists()


class Overflowing(torch.optim.SGD):
    """An optimizer that makes weights non-finite from finite gradients."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(1e38).mul_(1e38)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "folder"), [(full_finetune, "model"), (lora_finetune, "adapter")])
def test_overflowing_last_step_exports_nothing(recipe, folder, inputs, run_recipe, capsys):
    """Its loss and gradients are finite, and no later step would notice."""
    run = inputs.folder / "new"
    settings = [*inputs.settings(), f"output_dir={run}", "max_steps=1"]
    assert run_recipe([*settings, "optimizer._component_=recipes.test_not_finite.Overflowing"], recipe) == 2
    shown = capsys.readouterr()
    assert ".weight" in shown.err and losses(run)[0] is not None
    assert not (run / folder).exists() and "done" not in shown.out


@pytest.mark.slow
def test_learning_rate_too_high_for_the_dtype_of_the_weights(inputs, run_recipe, capsys):
    """The weights are in fp16, near its largest number, 65,504."""
    name, run = "model.embed_tokens.weight", inputs.folder / "new"

    def change(tensors):
        tensors.update({key: tensor.half() for key, tensor in tensors.items()})
        tensors[name][:] = 65440

    inputs.change_tensors(change)
    settings = [*inputs.settings(), f"output_dir={run}", "max_steps=1", "schedule.warmup=0", "optimizer.lr=100"]
    assert run_recipe(settings) == 2
    shown = capsys.readouterr()
    assert name in shown.err and losses(run)[0] is not None
    assert not (run / "model").exists() and "done" not in shown.out
