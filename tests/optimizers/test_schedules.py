"""Learning rates against transformers' schedules and closed formulas."""

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


@pytest.mark.parametrize(("ours", "theirs"), [(cosine, "cosine"), (linear, "linear"), (constant, "constant")])
def test_without_warmup_as_in_transformers(ours, theirs):
    transformers = pytest.importorskip("transformers")

    def reference(optimizer, steps):
        return transformers.get_scheduler(theirs, optimizer, num_warmup_steps=0, num_training_steps=steps)

    assert rates(ours, 50) == pytest.approx(rates(reference, 50), rel=1e-12)


def test_warmup_rises_in_equal_steps_from_above_zero_to_the_full_rate():
    values = rates(constant, 10, warmup=4)
    assert values == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert rates(constant, 10, warmup=0.4) == values


def test_min_ratio_is_where_the_shape_ends():
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


def test_inverse_square_root():
    values = rates(inverse_square_root, 100, warmup=4)
    assert values[4:] == pytest.approx([2.0 * (4 / step) ** 0.5 for step in range(4, 100)])


def test_more_warmup_than_steps_is_refused():
    with pytest.raises(TuneError, match=r"schedule\.warmup: 11 steps of warm-up do not fit into 10 optimizer steps"):
        rates(cosine, 10, warmup=11)
