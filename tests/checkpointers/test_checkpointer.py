import uuid

import pytest
import torch
from torchao import optim as low_bit

from tune import distributed
from tune.checkpointers import Checkpointer
from tune.errors import TuneError


class Position:
    """A small state: what step it is."""

    def __init__(self, step=0):
        self.step = step

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def make(folder, optimizer_class=torch.optim.AdamW, size=3, groups=1, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(size, size)
    parameters = list(model.parameters())
    optimizer = optimizer_class([{"params": parameters[index::groups]} for index in range(groups)])
    return Checkpointer(
        folder,
        distributed.init("cpu"),
        model=model,
        optimizer=optimizer,
        schedule=Position(),
        data=Position(),
        **options,
    )


def train(checkpointer, step):
    checkpointer.model(torch.ones(checkpointer.model.in_features)).square().sum().backward()
    checkpointer.optimizer.step()
    checkpointer.optimizer.zero_grad()
    checkpointer.small["data"].step = step


@pytest.mark.parametrize("async_", [False, True])
def test_saved_and_restored(tmp_path, async_):
    first = make(tmp_path, every=2, async_=async_)
    for step in (1, 2, 3):
        train(first, step)
        first.step(step)
        if step == 2:
            saved = first.model.weight.clone()
    first.wait()
    second = make(tmp_path)
    assert second.resume("auto") == 2
    assert torch.equal(second.model.weight, saved) and second.small["data"].step == 2
    train(second, 3)
    assert torch.equal(second.model.weight, first.model.weight)


@pytest.mark.parametrize("async_", [False, True])
def test_another_process_may_come_first(tmp_path, monkeypatch, async_):
    """Each process's writer makes the folder if it is not there: rank 0 must not insist on being the first."""
    attempt = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: attempt)
    (tmp_path / f".step-00000001.{attempt.hex[:8]}").mkdir()
    checkpointer = make(tmp_path, async_=async_)
    train(checkpointer, 1)
    checkpointer.save(1)
    checkpointer.wait()
    assert checkpointer.newest() == tmp_path / "step-00000001"


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("optimizer_class", [low_bit.AdamW8bit, low_bit.AdamW4bit, low_bit.AdamWFp8])
def test_low_bit_states_are_saved_as_they_are(tmp_path, optimizer_class, async_):
    with torch.compiler.set_stance("force_eager"):
        first = make(tmp_path, optimizer_class, size=64, async_=async_)
        for step in (1, 2, 3):
            train(first, step)  # goes on while the second step is written
            if step == 2:
                saved = inner(first)
                first.save(2)
        first.wait()
        second = make(tmp_path, optimizer_class, size=64)
        assert second.resume("auto") == 2
        torch.testing.assert_close(inner(second), saved, rtol=0, atol=0)
        train(second, 3)
        torch.testing.assert_close(inner(second), inner(first), rtol=0, atol=0)
        assert torch.equal(second.model.weight, first.model.weight)


def inner(checkpointer):
    """Copies of the codes and scales of both moments of the weight."""
    state = checkpointer.optimizer.state[checkpointer.model.weight]
    moments = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    return {
        f"{name}.{part}": getattr(moment, part).clone()
        for name, moment in moments.items()
        for part in moment.__tensor_flatten__()[0]
    }


class Counting(torch.optim.SGD):
    """Keeps a number of its own in its groups, as Prodigy and others do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def test_of_groups_a_checkpoint_keeps_what_training_changed_and_no_settings(tmp_path):
    first = make(tmp_path, lambda parameters: Counting(parameters, lr=0.1, momentum=0.9), async_=False)
    for step in (1, 2):
        train(first, step)
    first.save(2)
    second = make(tmp_path, lambda parameters: Counting(parameters, lr=0.1, momentum=0.5))
    second.resume("auto")
    (group,) = second.optimizer.param_groups
    assert (group["count"], group["momentum"]) == (2, 0.5)
    with pytest.raises(TuneError, match="has 1 parameter groups, now there are 2"):
        make(tmp_path, lambda parameters: Counting(parameters, lr=0.1, momentum=0.5), groups=2).resume("auto")
