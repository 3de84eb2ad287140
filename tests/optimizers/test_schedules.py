"""Learning rates match the schedules of transformers and closed formulas."""

import json
import warnings

import pytest
import torch

from tune.errors import TuneError
from tune.optimizers import constant, cosine, inverse_square_root, linear, warmup_stable_decay


def rates(make, steps, **arguments):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = make(optimizer, steps, **arguments)
    values = []
    for _ in range(steps):
        values.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return values


SHAPES = [constant, linear, cosine, warmup_stable_decay, inverse_square_root]


@pytest.mark.parametrize(
    ("ours", "arguments", "theirs", "their_arguments"),
    [
        (constant, {}, "constant", {}),
        (linear, {}, "linear", {}),
        (cosine, {}, "cosine", {}),
        (cosine, {"min_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        (
            warmup_stable_decay,
            {"decay": 0.4, "min_ratio": 0.1},
            "warmup_stable_decay",
            {"num_decay_steps": 20, "min_lr_ratio": 0.1, "decay_type": "linear"},
        ),
    ],
)
def test_schedules_without_warmup_match_transformers(ours, arguments, theirs, their_arguments):
    transformers = pytest.importorskip("transformers")

    def reference(optimizer, steps):
        return transformers.get_scheduler(
            theirs, optimizer, num_warmup_steps=0, num_training_steps=steps, scheduler_specific_kwargs=their_arguments
        )

    assert rates(ours, 50, warmup=0, **arguments) == pytest.approx(rates(reference, 50), rel=1e-12)


@pytest.mark.parametrize("warmup", [1, 4])
def test_inverse_square_root_after_warmup_matches_transformers(warmup):
    transformers = pytest.importorskip("transformers")

    def reference(optimizer, steps):
        return transformers.get_scheduler("inverse_sqrt", optimizer, num_warmup_steps=warmup, num_training_steps=steps)

    actual, expected = rates(inverse_square_root, 50, warmup=warmup), rates(reference, 50)
    assert actual[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_single_step_has_the_full_rate(shape):
    assert rates(shape, 1, warmup=0) == [2.0]
    assert rates(shape, 1, warmup=1) == [1.0]


@pytest.mark.parametrize("shape", SHAPES)
def test_only_warmup(shape):
    assert rates(shape, 4, warmup=4) == pytest.approx([0.4, 0.8, 1.2, 1.6])
    assert rates(shape, 4, warmup=0.99) == rates(shape, 4, warmup=4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("in_tensors", [False, True])
def test_resumed_from_its_state(shape, in_tensors):
    """The state has plain numbers even if the optimizer has its rates in tensors, and torch does not warn."""
    warnings.simplefilter("error")

    def start():
        lr = torch.tensor(0.3) if in_tensors else 0.3
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        return optimizer, shape(optimizer, 9, warmup=3)

    (optimizer, schedule), (_, resumed) = start(), start()
    for step in range(9):
        resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
        assert resumed.last_epoch == step
        assert resumed.get_last_lr() == schedule.get_last_lr() == [float(optimizer.param_groups[0]["lr"])]
        optimizer.step()
        schedule.step()


def test_warmup_rises_linearly_from_above_zero_to_the_full_rate():
    values = rates(constant, 10, warmup=4)
    assert values == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert rates(constant, 10, warmup=0.4) == values
    assert rates(constant, 3, warmup=1) == [1.0, 2.0, 2.0]  # 1 is one step, not the whole run


def test_schedule_ends_at_min_ratio():
    for shape in (cosine, linear):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        schedule = shape(optimizer, 10, warmup=2, min_ratio=0.25)
        for _ in range(10):
            optimizer.step()
            schedule.step()
        assert schedule.get_last_lr() == pytest.approx([0.5])


def test_warmup_stable_decay():
    values = rates(warmup_stable_decay, 10, decay=0.4, min_ratio=0.5)
    assert values == pytest.approx([2.0] * 7 + [1.75, 1.5, 1.25])
    assert rates(warmup_stable_decay, 10) == pytest.approx([2.0] * 9 + [1.0])  # the last fifth by default
    after_warmup = rates(warmup_stable_decay, 10, warmup=2, decay=0.5)[2:]  # half of 8 steps
    assert after_warmup == pytest.approx([2.0] * 5 + [1.5, 1.0, 0.5])


def test_inverse_square_root():
    values = rates(inverse_square_root, 100, warmup=4)
    assert values[4:] == pytest.approx([2.0 * (4 / step) ** 0.5 for step in range(4, 100)])
    assert rates(inverse_square_root, 100)[3:] == pytest.approx([2.0 * (3 / step) ** 0.5 for step in range(3, 100)])


def test_more_warmup_than_steps_is_refused():
    with pytest.raises(TuneError, match=r"schedule\.warmup: 11 .* 10 optimizer steps"):
        rates(cosine, 10, warmup=11)
