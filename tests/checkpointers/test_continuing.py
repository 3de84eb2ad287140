"""Training that is saved, or stopped and resumed, equals uninterrupted training."""

import copy
import json

import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from tune import distributed, optimizers
from tune.checkpointers import Checkpointer
from tune.errors import TuneError

STEPS = 8
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "AdamW, amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "Adam": torch.optim.Adam,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "SGD": torch.optim.SGD,
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1),
    "Muon": lambda groups: optimizers.Muon([groups[0] | {"in_blocks": True}, *groups[1:]]),
    "Adafactor": optimizers.Adafactor,
}
SCHEDULES = {
    "ours": lambda optimizer: optimizers.cosine(optimizer, STEPS, warmup=2),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 7], 0.5),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, STEPS),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, 2),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(optimizer, 0.8)], [3]
    ),
    "transformers: linear": lambda optimizer: transformers.get_scheduler("linear", optimizer, 2, STEPS),
    "transformers: cosine": lambda optimizer: transformers.get_scheduler("cosine", optimizer, 2, STEPS),
    "transformers: polynomial": lambda optimizer: transformers.get_scheduler("polynomial", optimizer, 2, STEPS),
}


class Position:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Idle(torch.nn.Module):
    """A model in which `late` has gradients from step 5 on and `never` has none."""

    def __init__(self):
        super().__init__()
        self.used, self.late, self.never = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, input, step):
        return self.used(input) + (self.late(input) if step >= 5 else 0)


class Training:
    def __init__(self, folder, optimizer, schedule=SCHEDULES["ours"], **options):
        torch.manual_seed(0)
        self.model = Idle()
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim == 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        self.optimizer = optimizer([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01
        self.schedule = schedule(self.optimizer)
        self.checkpointer = Checkpointer(
            folder, distributed.init("cpu"), model=self.model, optimizer=self.optimizer, schedule=self.schedule,
            data=Position(), every=None, keep=None, async_=False, **options,
        )  # fmt: skip

    def take(self, steps, saves=(), dead=()):
        rates = []
        for step in steps:
            if step not in dead:
                self.model(torch.arange(4.0) + step, step).square().sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            rates.append([group["lr"] for group in self.optimizer.param_groups])
            self.schedule.step()
            if step in saves:
                self.checkpointer.save(step)
        return rates

    def weights(self):
        return copy.deepcopy(self.model.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saving_does_not_change_training(optimizer, tmp_path):
    """However often, and also before the first gradient (related: huggingface/accelerate#3007)."""
    plain, saving = (Training(tmp_path / name, OPTIMIZERS[optimizer]) for name in ("plain", "saving"))
    steps = range(1, STEPS + 1)
    plain.take(steps, dead=[1, 2])
    saving.take(steps, saves=steps, dead=[1, 2])
    torch.testing.assert_close(saving.weights(), plain.weights(), rtol=0, atol=0)


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_resumes_exactly(optimizer, at, tmp_path):
    """Save before the first gradient, while `late` has none yet, and after all layers but `never` have one."""
    dead = [1, 2]
    first = Training(tmp_path, OPTIMIZERS[optimizer])
    first.take(range(1, STEPS + 1), saves=[at], dead=dead)
    second = Training(tmp_path, OPTIMIZERS[optimizer])
    assert second.checkpointer.resume("auto") == at
    second.take(range(at + 1, STEPS + 1), dead=dead)
    torch.testing.assert_close(second.weights(), first.weights(), rtol=0, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_resumes_exactly(schedule, tmp_path):
    momentum = OPTIMIZERS["SGD, momentum"]
    first = Training(tmp_path, momentum, SCHEDULES[schedule])
    rates = first.take(range(1, STEPS + 1), saves=[4])
    second = Training(tmp_path, momentum, SCHEDULES[schedule])
    assert second.checkpointer.resume("auto") == 4
    assert second.take(range(5, STEPS + 1)) == rates[4:]
    torch.testing.assert_close(second.weights(), first.weights(), rtol=0, atol=0)


def test_new_learning_rate_applies_to_our_schedules(tmp_path):
    first = Training(tmp_path, torch.optim.AdamW)
    first.take([1, 2, 3], saves=[3])
    second = Training(tmp_path, lambda groups: torch.optim.AdamW(groups))
    second.schedule.base_lrs = [0.05, 0.05]  # as in a schedule created with another rate
    second.checkpointer.resume("auto")
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(5 * first.optimizer.param_groups[0]["lr"])


def test_checkpoint_without_states_records_its_optimizer(tmp_path):
    Training(tmp_path, torch.optim.AdamW).take([1], saves=[1], dead=[1])
    with pytest.raises(TuneError, match=r"AdamW.*SGD"):
        Training(tmp_path, OPTIMIZERS["SGD, momentum"]).checkpointer.resume("auto")


def test_export_fails_when_every_step_was_skipped(tmp_path):
    training = Training(tmp_path, torch.optim.AdamW, on_nan="skip")
    assert not training.checkpointer.accepts(1, {"loss": float("nan")}, [0])
    with pytest.raises(TuneError, match="on_nan"):
        training.checkpointer.finish()


def test_empty_parameter_group_keeps_its_settings(tmp_path):
    """As in a pipeline stage when other stages hold the parameters."""

    def with_an_empty_group(groups):
        return torch.optim.AdamW([*groups, {"params": [], "weight_decay": 0.5}])

    Training(tmp_path, with_an_empty_group).take([1], saves=[1])
    training = Training(tmp_path, with_an_empty_group)
    training.checkpointer.resume("auto")
    training.take([2])
    empty = training.optimizer.param_groups[2]
    assert (empty["params"], empty["weight_decay"], empty["betas"]) == ([], 0.5, (0.9, 0.999))


class Means:
    """A running mean of each weight's gradients, available from the first step on."""

    def __init__(self):
        self.means = {}

    def state_dict(self):
        return {"means": dict(self.means), "known": [*self.means]}

    def load_state_dict(self, state):
        self.means = state["means"]


@pytest.mark.parametrize("steps", [0, 3])
def test_state_created_by_the_first_step(steps, tmp_path):
    """A second optimizer and a custom object."""
    plain, first = (Training(tmp_path / name, OPTIMIZERS["SGD"], extra={}) for name in ("plain", "saved"))
    for training in (plain, first):
        extra(training)
    for step in range(1, steps + 1):
        advance(first, step)
        advance(plain, step)
    first.checkpointer.save(steps)
    second = Training(tmp_path / "saved", OPTIMIZERS["SGD"], extra={})
    extra(second)
    assert second.checkpointer.resume("auto") == steps
    for step in range(steps + 1, STEPS + 1):
        advance(plain, step)
        advance(second, step)
    torch.testing.assert_close(second.weights(), plain.weights(), rtol=0, atol=0)
    torch.testing.assert_close(second.means.means, plain.means.means, rtol=0, atol=0)


def extra(training):
    training.second = torch.optim.AdamW(training.model.used.parameters(), lr=0.1)
    training.means = Means()
    training.checkpointer.small |= {"second": training.second, "means": training.means}


def advance(training, step):
    training.model(torch.arange(4.0) + step, step).square().sum().backward()
    for name, parameter in training.model.used.named_parameters():
        training.means.means[name] = 0.5 * training.means.means.get(name, 0) + parameter.grad
    training.second.step()
    training.optimizer.zero_grad()
    training.schedule.step()


def alternate(training, steps, metrics=lambda step: {}):
    """Train one of two layers in each step, and freeze the other: a function of the step."""
    for step in steps:
        training.model.used.requires_grad_(step % 2 == 0)
        training.model.late.requires_grad_(step % 2 == 1)
        training.model(torch.arange(4.0) + step, 5).square().sum().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.checkpointer.step(step, metrics(step))


@pytest.mark.parametrize("at", [3, 4])
def test_parameters_frozen_in_the_loop_are_saved(at, tmp_path):
    whole, stopped, resumed = (Training(tmp_path / name, torch.optim.AdamW) for name in ("whole", "run", "run"))
    alternate(whole, range(1, 7))
    alternate(stopped, range(1, at + 1))
    stopped.checkpointer.save(at)
    frozen = [name for name, parameter in stopped.model.named_parameters() if not parameter.requires_grad]
    assert frozen == [f"{'used' if at % 2 else 'late'}.{kind}" for kind in ("weight", "bias")]
    assert resumed.checkpointer.resume() == at
    alternate(resumed, range(at + 1, 7))
    torch.testing.assert_close(resumed.weights(), whole.weights(), rtol=0, atol=0)


def test_best_weights_include_parameters_frozen_in_the_loop(tmp_path):
    how = {"keep_best": "validation_loss"}
    best, training = (Training(tmp_path / name, torch.optim.AdamW, **how) for name in ("best", "run"))
    alternate(best, range(1, 4))
    alternate(training, range(1, 7), lambda step: {"validation_loss": abs(step - 3.0)})
    assert training.checkpointer.finish() == 3
    torch.testing.assert_close(training.weights(), best.weights(), rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in training.model.parameters())  # for an export


def test_parameters_unfrozen_in_the_loop_are_reported(tmp_path):
    said = []
    training = Training(tmp_path, torch.optim.AdamW)
    training.model.late.requires_grad_(False)
    checkpointer = Checkpointer(tmp_path, model=training.model, optimizer=training.optimizer, tell=said.append)
    checkpointer.save(1)
    assert not said
    training.model.late.requires_grad_(True)
    checkpointer.save(2)
    checkpointer.save(3, wait=True)
    assert len(said) == 1 and "late.weight" in said[0]


def test_frozen_parameters_that_the_loop_changes_are_noted(tmp_path):
    """Without a place in the checkpoints, they are reported once; the note says which model a checkpoint is not."""

    def start(folder, **extra):
        said, training = [], Training(tmp_path / "unused", torch.optim.AdamW)
        training.model.never.requires_grad_(False)
        checkpointer = Checkpointer(
            folder, model=training.model, optimizer=training.optimizer, base=Position(), tell=said.append, async_=False
        )
        checkpointer.add(**{name: part(training.model) for name, part in extra.items()})
        return said, training, checkpointer

    def noted(folder, step):
        return json.loads((folder / f"step-{step:08d}" / "state.json").read_text())["changed"]

    bare, whole = tmp_path / "bare", tmp_path / "whole"
    said, training, checkpointer = start(bare)
    training.take([1])
    checkpointer.save(1)
    assert not said and not noted(bare, 1)
    with torch.no_grad():
        training.model.never.weight.add_(1)
    checkpointer.save(2)
    checkpointer.save(3)
    assert len(said) == 1 and "never.weight" in said[0] and noted(bare, 3) == ["never.weight"]

    bases = {"bases": lambda model: {"never": model.never.weight}}
    said, training, checkpointer = start(whole, **bases)
    with torch.no_grad():
        training.model.never.weight.add_(1)
    checkpointer.save(1)
    assert not said and noted(whole, 1) == ["never.weight"]
    said, resumed, checkpointer = start(whole, **bases)
    assert checkpointer.resume() == 1
    torch.testing.assert_close(resumed.model.never.weight, training.model.never.weight, rtol=0, atol=0)
    checkpointer.save(2)
    assert not said and noted(whole, 2) == ["never.weight"]


def test_best_weights_are_the_last_ones_if_frozen_parameters_changed(tmp_path):
    """The base of the best step is not in its checkpoint."""
    training = Training(tmp_path / "unused", torch.optim.AdamW)
    training.model.never.requires_grad_(False)
    checkpointer = Checkpointer(
        tmp_path / "run", model=training.model, optimizer=training.optimizer, base=Position(), every=None,
        keep_best="validation_loss", async_=False,
    )  # fmt: skip
    for step in (1, 2):
        training.take([step])
        with torch.no_grad():
            training.model.never.weight.add_(1)
        checkpointer.step(step, {"validation_loss": float(step)})
    checkpointer.save(2)
    last = training.weights()
    assert checkpointer.finish() is None
    torch.testing.assert_close(training.weights(), last, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    ["best", "step", "groups", "optimizer", "updates", "stopped", "changed", "data", "schedule", "model", "mine"],
)
def test_own_state_cannot_take_the_name_of_another_one(tmp_path, name):
    """It would replace that state, or be lost with it."""
    training = Training(tmp_path / "unused", torch.optim.AdamW)
    checkpointer = Checkpointer(
        tmp_path / "run", model=training.model, optimizer=training.optimizer, data=Position(), extra={"mine": {"a": 1}}
    )
    with pytest.raises(TuneError, match=f"extra.{name}:"):
        checkpointer.add(**{name: {"value": 1.0}})
