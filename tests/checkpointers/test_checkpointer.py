import uuid

import pytest
import torch

from tune import distributed
from tune.checkpointers import Checkpointer


class Position:
    """A small state: what step it is."""

    def __init__(self, step=0):
        self.step = step

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def make(folder, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
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
    checkpointer.model(torch.ones(3)).sum().backward()
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
