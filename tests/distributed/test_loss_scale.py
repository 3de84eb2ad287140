"""fp16 gradients match fp32 even when the loss is so small that fp16 alone would lose them."""

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


def gradients_with_scale(model):
    return {name: gradient / SMALL for name, gradient in gradients(model, SMALL).items()}


@pytest.mark.parametrize("execution", [{}, {"activation_checkpointing": "full"}, {"cpu_offload": True}])
def test_small_gradients_match_fp32(execution, checkpoint, expected):
    model = model_of(str(checkpoint), distributed.init("cpu"), **execution)
    assert error(gradients_with_scale(model), expected) < 0.01
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_small_gradients_are_lost_without_the_scale(checkpoint, expected):
    model = model_of(str(checkpoint), distributed.init("cpu"))
    model.parallelism.loss_scale.load_state_dict({"value": 1.0, "steps": 0, "skipped": 0})
    model.zero_grad()
    assert error(gradients_with_scale(model), expected) > 0.9


def test_gradients_of_adapters(checkpoint):
    """Without FSDP, because nothing is cast or sharded."""
    models = [
        model_of(str(checkpoint), distributed.init("cpu"), adapted=True, dtype=dtype) for dtype in ("fp16", "fp32")
    ]
    assert models[1].parallelism.loss_scale is None
    assert error(gradients_with_scale(models[0]), gradients(models[1])) < 0.02


def test_router_loss_is_scaled(tmp_path):
    """Its gradient starts inside the model, where gradients are already scaled."""
    folder = str(save_checkpoint(
        tmp_path / "moe", "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16,
        output_router_logits=True, router_aux_loss_coef=50.0,
    ))  # fmt: skip
    exact = load_model(folder)
    assert exact.train().config.router_loss == 50
    model = model_of(folder, distributed.init("cpu"))
    model.parallelism.loss_scale.load_state_dict({"value": 64.0, "steps": 0, "skipped": 0})
    of_routers = [
        {name: value for name, value in gradients(part).items() if "router" in name} for part in (model, exact)
    ]
    assert len(of_routers[1]) == 3 and error(*of_routers) < 0.02


@pytest.mark.slow
def test_layouts(checkpoint):
    script = Path(__file__).with_name("scaled_gradients.py")
    lines = run_processes(script, 2, str(checkpoint), json.dumps(LAYOUTS)).splitlines()
    errors = [json.loads(line) for line in lines if line.startswith("[")]
    assert [layout for layout, _ in errors] == LAYOUTS
    assert max(relative for _, relative in errors) < 0.01, errors


def test_weights_in_another_dtype_are_rejected(checkpoint):
    with pytest.raises(TuneError, match=r"master_dtype: .* fp32"):
        model_of(str(checkpoint), distributed.init("cpu"), master_dtype="bf16")


class TestDynamics:
    """The scale follows torch.amp.GradScaler on the same overflows."""

    def test_same_scales_as_torch(self, checkpoint, monkeypatch):
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

    @pytest.mark.slow
    def test_overflowing_step_is_skipped_and_the_scale_saved(self, checkpoint, tmp_path):
        messages = []

        def made():
            model = model_of(str(checkpoint), distributed.init("cpu"))
            optimizer = torch.optim.AdamW(model.parameters())
            return model, Checkpointer(tmp_path, model=model, optimizer=optimizer, tell=messages.append)

        model, checkpointer = made()
        assert not checkpointer.accepts(1, {"loss": 2.0, "grad_norm": math.inf}, [0]) and checkpointer.refused == 1
        assert "step 1" in messages[-1] and "32768" in messages[-1] and "1 such" in messages[-1]
        assert checkpointer.accepts(2, {"loss": 2.0, "grad_norm": 1.0}, [0]) and not checkpointer.refused
        gradients(model, SMALL)
        checkpointer.optimizer.step()
        checkpointer.step(2, now=True)
        again, resumed = made()
        assert resumed.resume() == 2
        assert again.parallelism.loss_scale.state_dict() == {"value": 2.0**15, "steps": 1, "skipped": 1}
        # on_nan decides about nonfinite losses and gradients that are too large at any scale.
        with pytest.raises(TuneError, match="loss is nan at step 3"):
            resumed.accepts(3, {"loss": math.nan, "grad_norm": math.nan}, [0])
        again.parallelism.loss_scale.value = 1.0
        with pytest.raises(TuneError, match="grad_norm is inf at step 4"):
            resumed.accepts(4, {"loss": 1.0, "grad_norm": math.inf}, [0])

    def test_gradients_are_divided_by_the_new_scale(self, checkpoint, expected):
        model = model_of(str(checkpoint), distributed.init("cpu"))
        model.parallelism.loss_scale.update(is_finite=False)
        assert error(gradients_with_scale(model), expected) < 0.01


def test_models_that_are_not_trained_have_no_scale(checkpoint):
    frozen = peft.open_model(checkpoint).shard(distributed.init("cpu"), "fp16")
    assert frozen.parallelism.loss_scale is None
