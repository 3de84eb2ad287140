"""Gradients in fp16: as those of fp32, where the loss is so small that fp16 alone would lose them."""

import json
import math
from pathlib import Path

import pytest
import torch
from distributed.scaled_gradients import SMALL, error, gradients, model_of
from helpers import run_processes, save_checkpoint
from torch import nn

from tune import distributed, peft
from tune.checkpointers import Checkpointer, load_model
from tune.errors import TuneError

LAYOUTS = [
    {"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"tp": 2}, {"cp": 2},
    {"reduce_every_micro_batch": False},
]  # fmt: skip


@pytest.fixture(scope="module")
def expected(checkpoint):
    return gradients(load_model(str(checkpoint)))


def found(model):
    return {name: gradient / SMALL for name, gradient in gradients(model, SMALL).items()}


@pytest.mark.parametrize("execution", [{}, {"activation_checkpointing": "full"}, {"cpu_offload": True}])
def test_small_gradients_are_those_of_fp32(execution, checkpoint, expected):
    model = model_of(str(checkpoint), distributed.init("cpu"), **execution)
    assert error(found(model), expected) < 0.01
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_without_the_scale_they_are_lost(checkpoint, expected):
    model = model_of(str(checkpoint), distributed.init("cpu"))
    model.parallelism.loss_scale.load_state_dict({"value": 1.0, "steps": 0, "skipped": 0})
    model.zero_grad()
    assert error(found(model), expected) > 0.9


def test_gradients_of_adapters(checkpoint):
    """Without FSDP, as nothing is cast or shared."""
    models = [model_of(str(checkpoint), distributed.init("cpu"), adapted=True, dtype=each) for each in ("fp16", "fp32")]
    assert models[1].parallelism.loss_scale is None
    assert error(found(models[0]), gradients(models[1])) < 0.02


def test_the_loss_of_a_router_is_scaled_too(tmp_path):
    """It begins inside of the model, where gradients are scaled already."""
    folder = str(save_checkpoint(
        tmp_path / "moe", "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16,
        output_router_logits=True, router_aux_loss_coef=50.0,
    ))  # fmt: skip
    exact = load_model(folder)
    assert exact.train().config.router_loss == 50
    model = model_of(folder, distributed.init("cpu"))
    model.parallelism.loss_scale.load_state_dict({"value": 64.0, "steps": 0, "skipped": 0})
    of_routers = [{name: each for name, each in gradients(each).items() if "router" in name} for each in (model, exact)]
    assert len(of_routers[1]) == 3 and error(*of_routers) < 0.02


@pytest.mark.slow
def test_layouts(checkpoint):
    script = Path(__file__).with_name("scaled_gradients.py")
    lines = run_processes(script, 2, str(checkpoint), json.dumps(LAYOUTS)).splitlines()
    errors = [json.loads(line) for line in lines if line.startswith("[")]
    assert [layout for layout, _ in errors] == LAYOUTS
    assert max(each for _, each in errors) < 0.01, errors


def test_weights_in_another_type_are_refused(checkpoint):
    with pytest.raises(TuneError, match=r"master_dtype: .* fp32"):
        model_of(str(checkpoint), distributed.init("cpu"), master_dtype="bf16")


class TestDynamics:
    """Of torch.amp.GradScaler, on the same overflows."""

    def test_as_torch_has_it(self, checkpoint, monkeypatch):
        monkeypatch.setattr(distributed.LossScale, "GROWS_AFTER", 3)
        scale = model_of(str(checkpoint), distributed.init("cpu")).parallelism.loss_scale
        theirs = torch.amp.GradScaler("cpu", growth_interval=3)
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        for is_finite in [False, True, True, True, True, False, False, True, True, True, True, True, True]:
            theirs.scale(parameter.sum() * (1.0 if is_finite else math.inf)).backward()
            theirs.step(optimizer)
            theirs.update()
            optimizer.zero_grad()
            scale.update(is_finite)
            assert scale.value == theirs.get_scale()
        assert scale.skipped == 3

    def test_a_step_that_overflows_is_left_out_and_the_scale_kept(self, checkpoint, tmp_path):
        told = []

        def made():
            model = model_of(str(checkpoint), distributed.init("cpu"))
            optimizer = torch.optim.AdamW(model.parameters())
            return model, Checkpointer(tmp_path, model=model, optimizer=optimizer, tell=told.append)

        model, checkpointer = made()
        assert not checkpointer.accepts(1, [0], loss=2.0, grad_norm=math.inf) and checkpointer.refused == 1
        assert "step 1" in told[-1] and "32768" in told[-1] and "1 such" in told[-1]
        assert checkpointer.accepts(2, [0], loss=2.0, grad_norm=1.0) and not checkpointer.refused
        gradients(model, SMALL)
        checkpointer.optimizer.step()
        checkpointer.step(2, now=True)
        again, resumed = made()
        assert resumed.resume() == 2
        assert again.parallelism.loss_scale.state_dict() == {"value": 2.0**15, "steps": 1, "skipped": 1}
        # A loss that is not finite, and gradients that are too large at any scale, are for on_nan to decide.
        with pytest.raises(TuneError, match="loss is nan at step 3"):
            resumed.accepts(3, [0], loss=math.nan, grad_norm=math.nan)
        again.parallelism.loss_scale.value = 1.0
        with pytest.raises(TuneError, match="grad_norm is inf at step 4"):
            resumed.accepts(4, [0], loss=1.0, grad_norm=math.inf)

    def test_gradients_are_divided_by_the_new_value(self, checkpoint, expected):
        model = model_of(str(checkpoint), distributed.init("cpu"))
        model.parallelism.loss_scale.update(is_finite=False)
        assert error(found(model), expected) < 0.01


def test_models_that_are_not_trained_have_none(checkpoint):
    frozen = peft.open_model(checkpoint).shard(distributed.init("cpu"), "fp16")
    assert frozen.parallelism.loss_scale is None
