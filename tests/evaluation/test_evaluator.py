"""The one clock of an evaluator, and measurements with a clock of their own."""

import contextlib
from types import SimpleNamespace

import pytest

from tune import distributed
from tune.checkpointers import load_model
from tune.datasets import DataLoader, load
from tune.evaluation import Evaluator
from tune.losses import LinearCrossEntropy
from tune.tokenizers import Tokenizer


@pytest.fixture
def run():
    """A run of 6 steps that records what it is told."""
    recorded, paused = {}, []

    @contextlib.contextmanager
    def pause():
        paused.append(True)
        yield

    return SimpleNamespace(
        world=distributed.init("cpu"), pause=pause, paused=paused, recorded=recorded, info=print,
        record=lambda step, metrics: recorded.setdefault(step, {}).update(metrics), is_end=lambda step: step == 6,
        append=lambda file, rows: None,
    )  # fmt: skip


def measured(evaluator):
    """Return what the evaluator measures before the first step, after each of six steps, and at the end."""
    found = {step: evaluator(step) for step in range(7)}
    return {step: {*metrics} for step, metrics in found.items() if metrics}, {*evaluator.at_end(6)}


@pytest.fixture
def tokenizer(checkpoint):
    return Tokenizer(str(checkpoint))


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ({}, {}),
        ({"every": 2}, {2: {"a"}, 4: {"a"}}),
        ({"first": True}, {0: {"a"}}),
        ({"every": 5, "first": True}, {0: {"a"}, 5: {"a"}}),
    ],
)
def test_measurement_takes_the_clock_of_the_evaluator(clock, expected, run, checkpoint, tokenizer):
    evaluator = Evaluator(run, load_model(str(checkpoint)), tokenizer, **clock)
    evaluator.add(lambda: {"a": 1.0})
    assert measured(evaluator) == (expected, {"a"})
    assert run.recorded == ({0: {"a": 1.0}} if clock.get("first") else {})
    assert evaluator.at_end(6) == {}  # it was measured after this step


def test_measurements_may_have_their_own_clock(run, checkpoint, tokenizer):
    evaluator = Evaluator(run, load_model(str(checkpoint)), tokenizer, every=3, first=True)
    evaluator.add(lambda: {"usual": 1.0})
    evaluator.add(lambda: {"often": 1.0}, every=2)
    evaluator.add(lambda: {"later": 1.0}, first=False)
    at_steps, at_end = measured(evaluator)
    assert at_steps == {0: {"usual", "often"}, 2: {"often"}, 3: {"usual", "later"}, 4: {"often"}}
    assert at_end == {"usual", "often", "later"}
    assert len(run.paused) == 9  # the time of each is not that of a step


def test_validation_is_of_the_loaders_data_and_on_the_same_clock(run, checkpoint, chats, tokenizer):
    model, loss_fn = load_model(str(checkpoint)), LinearCrossEntropy()

    def evaluator_of(validation, *loss):
        dataset = load(tokenizer, str(chats), max_seq_len=128, take=8, validation=validation)
        return Evaluator(run, model, tokenizer, DataLoader(dataset, run.world, 4, 2), *loss, every=4)

    evaluator = evaluator_of({"take": 5}, loss_fn)
    assert measured(evaluator) == ({4: {"validation_loss"}}, {"validation_loss"})
    assert len(evaluator.validation) == 5
    assert measured(evaluator_of(None, loss_fn)) == ({}, set())  # without validation data
    assert measured(evaluator_of({"take": 5})) == ({}, set())  # without a loss, a recipe adds a validation of its own
