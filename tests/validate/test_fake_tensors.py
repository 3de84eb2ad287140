"""Weights without values: results computed from them have only shapes, and known values stay known."""

import copy
import math
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from tune.validate.fake_tensors import LARGE, FakeWeights


@pytest.fixture
def weights():
    with closing(FakeWeights()) as weights:
        yield weights


@pytest.fixture
def weight(weights):
    with weights.made():
        return torch.nn.Parameter(torch.empty(4, 3))


def test_results_of_a_fake_weight_have_shapes(weight):
    loss = (torch.ones(2, 3) @ weight.T).square().sum()
    loss.backward()
    assert isinstance(loss, FakeTensor) and weight.grad.shape == (4, 3)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].shape == (4, 3)


def test_known_numbers_keep_their_values(weight):
    rewards = torch.tensor([1.0, 3.0])
    assert (rewards - rewards.mean()).tolist() == [-1.0, 1.0]
    assert torch.arange(5)[torch.tensor([False, True, False, True, False])].numpy().tolist() == [1, 3]


def test_tensors_are_copied_with_what_is_known_of_them(weights, weight):
    known, unknown = copy.deepcopy([torch.arange(3), torch.empty(3)])
    assert known.tolist() == [0, 1, 2] and not weights.is_fake(known)
    assert weights.is_fake(unknown) and not isinstance(unknown, FakeTensor)
    assert isinstance(copy.deepcopy(weight), FakeTensor)
    module = copy.deepcopy(torch.nn.BatchNorm1d(3))
    assert module.running_var.tolist() == [1, 1, 1]


ROW = torch.tensor([2])
TYPED = {  # an operation with a tensor of a type, the type that it takes, and one that it refuses
    "mm": (lambda x, kind: x @ torch.ones(3, 2, dtype=kind), torch.float32, torch.bfloat16),
    "addmm": (lambda x, kind: torch.addmm(torch.ones(2), x, torch.ones(3, 2, dtype=kind)), torch.float32, torch.double),
    "index_put": (lambda x, kind: x.index_put((ROW,), torch.ones(1, 3, dtype=kind)), torch.float32, torch.bfloat16),
    "index_add": (lambda x, kind: x.index_add(0, ROW, torch.ones(1, 3, dtype=kind)), torch.float32, torch.bfloat16),
    "index_copy": (lambda x, kind: x.index_copy(0, ROW, torch.ones(1, 3, dtype=kind)), torch.float32, torch.bfloat16),
    "labels": (lambda x, kind: F.cross_entropy(x, torch.zeros(4, dtype=kind)), torch.long, torch.int32),
}


@pytest.mark.parametrize("name", TYPED)
def test_types_are_compared_as_for_real_tensors(weight, name):
    operation, right, wrong = TYPED[name]
    for tensor in (torch.ones(4, 3), weight):
        operation(tensor, right)
        with pytest.raises(RuntimeError):
            operation(tensor, wrong)


def test_unknown_numbers_have_stand_ins(weight):
    assert weight.sum().item() == 1.0 and weight.long().max().item() == 1
    assert not bool(weight.sum() > 0)


def test_all_positions_of_a_condition_are_selected(weight):
    assert weight[weight > 0].shape == (12,) and weight[weight[:, 0] > 0].shape == (4, 3)
    assert weight.detach().masked_select(weight > 0).shape == (12,)
    assert (weight > 0).nonzero().shape == (12, 2)


def test_grouped_products_in_fp32(weight):
    """One matrix per group of rows, and one output matrix per group, as with real tensors."""
    rows, matrices, ends = torch.ones(8, 4), torch.ones(2, 4, 12), torch.tensor([3, 8], dtype=torch.int32)
    for a, b in ((rows, matrices), (rows.T, torch.ones(8, 12))):
        product = torch.nn.functional.grouped_mm(a + weight.sum(), b, offs=ends)
        assert isinstance(product, FakeTensor)
        assert product.shape == torch.nn.functional.grouped_mm(a, b, offs=ends).shape


def test_tensor_becomes_unknown_when_a_fake_one_is_added(weight):
    total = torch.zeros(())
    total += weight.detach().sum()
    assert total.item() == 1.0


def test_large_or_valueless_tensors_are_not_materialized(weight):
    assert isinstance(torch.zeros(LARGE, 2), FakeTensor)
    assert not isinstance(torch.zeros(2), FakeTensor)
    assert torch.empty(LARGE, 2, device="meta").is_meta


def test_memory_is_known_once_it_is_written_as_a_whole(weights, weight):
    memory = torch.empty(4)
    assert weights.is_fake(memory)
    memory[:2].fill_(3.0)
    assert weights.is_fake(memory)
    assert memory.fill_(2.0).sum() == 8 and torch.empty(2).copy_(torch.ones(2)).tolist() == [1, 1]
    memory[0] = weight.detach().sum()
    assert weights.is_fake(memory) and memory.sum().item() == 1.0


def test_numbers_that_are_made_up_are_finite(weights, weight):
    loss = weight.detach().sum()
    assert torch.isfinite(loss) and not torch.isnan(loss) and not torch.isinf(loss)
    assert torch.isfinite(weight).all() and not (~torch.isfinite(weight)).any() and not torch.isnan(weight).any()
    assert torch.isnan(weight).sum().item() == 0 and torch.isfinite(weight).sum() == weight.numel()
    assert torch.isfinite(torch.stack([loss, loss])).all() and loss < math.inf
    assert [*weights.asked] == [__file__]


def test_fake_mode_ends():
    weights = FakeWeights()
    with weights.made():
        assert isinstance(torch.zeros(2), FakeTensor)
    weights.close()
    assert not isinstance(torch.empty(2), FakeTensor)
