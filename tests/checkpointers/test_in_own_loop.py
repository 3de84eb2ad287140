"""A Checkpointer in your own training loop: any scheduler, no World, states of any kind."""

import random

import numpy as np
import pytest
import torch
from helpers import run_processes
from torch.optim import lr_scheduler as theirs

from tune import optimizers
from tune.checkpointers import Checkpointer
from tune.errors import TuneError

STEPS = 10


def of_transformers(name, **options):
    def make(optimizer):
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, name)(optimizer, **options)

    return make


SCHEDULES = {
    "LambdaLR": lambda optimizer: theirs.LambdaLR(optimizer, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda optimizer: theirs.CosineAnnealingLR(optimizer, STEPS),
    "OneCycleLR": lambda optimizer: theirs.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 2),
    "ReduceLROnPlateau": lambda optimizer: theirs.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
    "MultiStepLR": lambda optimizer: theirs.MultiStepLR(optimizer, [2, 5, 7]),
    "ExponentialLR": lambda optimizer: theirs.ExponentialLR(optimizer, 0.8),
    "CyclicLR": lambda optimizer: theirs.CyclicLR(optimizer, 0.001, 0.01, step_size_up=3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda optimizer: theirs.CosineAnnealingWarmRestarts(optimizer, 4),
    "SequentialLR": lambda optimizer: theirs.SequentialLR(
        optimizer, [theirs.LinearLR(optimizer, 0.1, total_iters=3), theirs.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "get_cosine_schedule_with_warmup": of_transformers(
        "get_cosine_schedule_with_warmup", num_warmup_steps=2, num_training_steps=STEPS
    ),
    "get_linear_schedule_with_warmup": of_transformers(
        "get_linear_schedule_with_warmup", num_warmup_steps=2, num_training_steps=STEPS
    ),
    "tune.optimizers.cosine": lambda optimizer: optimizers.cosine(optimizer, STEPS, warmup=2),
}


class Training:
    """A loop over ten steps; `rates` and `betas` are the learning rate and the momenta before each step."""

    def __init__(self, make_schedule, folder=None, optimizer_class=torch.optim.AdamW):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 3)
        self.optimizer = optimizer_class(self.model.parameters(), lr=0.01)
        self.schedule, self.rates, self.betas = make_schedule(self.optimizer), [], []
        self.checkpointer = folder and Checkpointer(
            folder, model=self.model, optimizer=self.optimizer, schedule=self.schedule, async_=False
        )

    def run(self, first, last):
        for step in range(first, last + 1):
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            self.betas.append(self.optimizer.param_groups[0].get("betas"))
            self.model(torch.full((3,), float(step))).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            plateau = isinstance(self.schedule, theirs.ReduceLROnPlateau)
            self.schedule.step(*[1.0] * plateau)
        return self


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_learning_rate_continues_with_any_schedule(name, optimizer_class, tmp_path):
    if name == "OneCycleLR" and optimizer_class is torch.optim.SGD:
        optimizer_class = lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9)  # noqa: E731
    whole = Training(SCHEDULES[name], None, optimizer_class).run(1, STEPS)
    first = Training(SCHEDULES[name], str(tmp_path), optimizer_class).run(1, 5)
    first.checkpointer.save(5, wait=True)
    second = Training(SCHEDULES[name], str(tmp_path), optimizer_class)
    assert second.checkpointer.resume("auto") == 5
    assert len(set(whole.rates)) > 1
    second.run(6, STEPS)
    assert second.rates == pytest.approx(whole.rates[5:], abs=1e-15)
    assert second.betas == whole.betas[5:]
    assert torch.equal(second.model.weight, whole.model.weight)


class Anything:
    """A custom state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def checkpointer(folder, **extra):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Checkpointer(folder, model=model, optimizer=optimizer, async_=False, extra=extra)


PLAIN = {
    "tuple": (1, (2, 3), [4, (5,)]),
    "int keys": {1: "a", 2: {3: (4,)}},
    "tuple keys": {(1, 2): 3},
    "none": None,
    "set": {1, 2},
    "numbers": [1.5, float("inf"), True],
    "like ours": {"__pairs__": [[1, 2]]},
    "bytes": b"\x00\xff",
}


def test_plain_states_round_trip(tmp_path):
    checkpointer(tmp_path, mine=Anything(PLAIN)).save(1, wait=True)
    mine = Anything({})
    checkpointer(tmp_path, mine=mine).resume("auto")
    assert mine.state == PLAIN
    assert type(mine.state["tuple"]) is tuple and type(mine.state["tuple"][2][1]) is tuple


def test_generator_states_round_trip(tmp_path):
    generator = torch.Generator().manual_seed(7)
    mine = {
        "torch": Anything({"state": generator.get_state()}),
        "python": Anything({"state": random.Random(3).getstate()}),
        "numpy": Anything(np.random.default_rng(5).bit_generator.state),
    }
    checkpointer(tmp_path, **mine).save(1, wait=True)
    restored = {name: Anything({}) for name in mine}
    checkpointer(tmp_path, **restored).resume("auto")
    other = torch.Generator()
    other.set_state(restored["torch"].state["state"])
    assert torch.equal(torch.rand(5, generator=other), torch.rand(5, generator=torch.Generator().manual_seed(7)))
    python = random.Random()
    python.setstate(restored["python"].state["state"])
    assert python.random() == random.Random(3).random()
    drawn = np.random.default_rng()
    drawn.bit_generator.state = restored["numpy"].state
    assert drawn.random() == np.random.default_rng(5).random()


def test_generator_can_be_a_state(tmp_path):
    def draw(resume):
        generator = torch.Generator().manual_seed(7)
        saver = checkpointer(tmp_path, dropout=generator)
        if resume:
            saver.resume("auto")
        else:
            torch.rand(3, generator=generator)
            saver.save(1, wait=True)
        return torch.rand(5, generator=generator)

    assert torch.equal(draw(resume=False), draw(resume=True))


def test_unsupported_state_is_rejected(tmp_path):
    with pytest.raises(TuneError, match=r"extra\.counts.*state_dict"):
        checkpointer(tmp_path, counts=["a", "b"])
    with pytest.raises(TuneError, match=r"mine.*a: object"):
        checkpointer(tmp_path, mine=Anything({"a": object()})).save(1, wait=True)


def test_invalid_arguments_are_rejected(tmp_path):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for name, value in {"on_nan": "skp", "on_error": "ignore", "every": 0, "keep": -1}.items():
        with pytest.raises(TuneError, match=f"^{name}: "):
            Checkpointer(tmp_path, model=model, optimizer=optimizer, **{name: value})


def test_second_optimizer_resumes(tmp_path):
    """Its state has integer keys, tuples, and tensors."""

    def make(resume):
        torch.manual_seed(1)
        other = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, betas=(0.5, 0.75))
        saver = checkpointer(tmp_path, critic=optimizer, weights=other)
        if resume:
            saver.resume("auto")
        return other, optimizer, saver

    def step(other, optimizer):
        other(torch.ones(2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    other, optimizer, saver = make(resume=False)
    step(other, optimizer)
    saver.save(1, wait=True)
    step(other, optimizer)
    again, restored, _ = make(resume=True)
    assert restored.state_dict()["state"].keys() == {0, 1}
    assert restored.param_groups[0]["betas"] == (0.5, 0.75)
    step(again, restored)
    assert torch.equal(again.weight, other.weight)


def test_tensors_in_tuples_and_under_non_string_keys(tmp_path):
    state = {1: (torch.ones(2), "a"), "1": [torch.zeros(3)], ("x", 2): {"deep": (torch.full((1,), 7.0),)}}
    checkpointer(tmp_path, mine=Anything(state)).save(1, wait=True)
    mine = Anything({})
    checkpointer(tmp_path, mine=mine).resume("auto")
    assert mine.state.keys() == state.keys() and isinstance(mine.state[1], tuple) and mine.state[1][1] == "a"
    assert torch.equal(mine.state[1][0], torch.ones(2)) and torch.equal(mine.state["1"][0], torch.zeros(3))
    assert mine.state[("x", 2)]["deep"][0].item() == 7.0


def test_parameters_outside_the_model_are_rejected(tmp_path):
    model, other = torch.nn.Linear(3, 3), torch.nn.Linear(5, 2)
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": other.parameters()}])
    with pytest.raises(TuneError, match=r"group 1 .*\(2, 5\)"):
        Checkpointer(tmp_path, model=model, optimizer=optimizer)


OWN_TO_EACH_RANK = """
import sys
import torch
from tune import distributed
from tune.checkpointers import Checkpointer

world = distributed.init("cpu")


class Counts:
    def __init__(self):
        self.tensors = {f"t{i}": torch.full((4,), float(world.rank + 1)) for i in range(5)}
    def state_dict(self):
        return dict(self.tensors)
    def load_state_dict(self, state):
        self.tensors = state


def make():
    model = torch.nn.Linear(3, 3)
    for i in range(6):
        model.register_buffer(f"b{i}", torch.tensor(world.rank + 1.0))
    counts, generator = Counts(), torch.Generator().manual_seed(world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = {"counts": counts, "generator": generator}
    return model, counts, generator, Checkpointer(sys.argv[1], model=model, optimizer=optimizer, extra=extra)


model, counts, generator, checkpointer = make()
checkpointer.step(1, now=True)
model, counts, generator, checkpointer = make()
assert checkpointer.resume() == 1
assert [float(buffer) for buffer in model.buffers()] == [1.0] * 6, [*model.buffers()]
assert all(bool((tensor == 1).all()) for tensor in counts.tensors.values()), counts.tensors
assert torch.equal(generator.get_state(), torch.Generator().manual_seed(0).get_state())
world.finish()
"""


@pytest.mark.slow
def test_unsharded_state_is_restored_from_rank_0(tmp_path):
    (tmp_path / "script.py").write_text(OWN_TO_EACH_RANK)
    run_processes(tmp_path / "script.py", 2, str(tmp_path / "checkpoints"))


def test_tensors_and_dicts_are_saved_and_restored_in_place(tmp_path):
    def made(value, counts):
        model = torch.nn.Linear(2, 2)
        ours = Checkpointer(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), async_=False)
        ours.add(mean=value, counts=counts)
        return ours

    made(torch.tensor([1.0, 2.0], dtype=torch.float64), {"seen": 3, ("a", 1): {4, 5}}).save(1)
    mean, counts = torch.zeros(2, dtype=torch.float64), {"other": 0}
    assert made(mean, counts).resume("auto") == 1
    assert mean.tolist() == [1, 2] and counts == {"seen": 3, ("a", 1): {4, 5}}
