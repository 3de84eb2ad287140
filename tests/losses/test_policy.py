"""Policy losses and their gradients match their formulas, token by token in fp64."""

import math

import pytest
import torch
from torch.testing import assert_close

from tune.collators import Batch
from tune.losses import GSPO, ClippedPolicy, PolicyGradient, kl_estimate, of_tokens

LENGTHS = [5, 2, 4, 1]  # supervised tokens of four documents; the last three share a row that ends with padding


@pytest.fixture
def batch():
    labels = torch.tensor([[-100, 1, 2, 3, 4, 5] + [-100] * 5, [-100, 1, 2, -100, 1, 2, 3, 4, 5, -100, -100]])
    ids = torch.tensor([[0] * 7 + [1] * 4, [2] * 3 + [3] * 5 + [4] + [5] * 2])
    columns = {
        "advantage": torch.tensor([1.5, 0.0, -0.7, 0.4, -1.1, 0.0]),
        "sampled": torch.arange(22.0).reshape(2, 11),
    }
    return Batch.of(torch.zeros(2, 11, dtype=torch.long), labels, ids, columns=columns)


def values():
    torch.manual_seed(0)
    sampled = -torch.rand(sum(LENGTHS), dtype=torch.float64) * 3
    return (sampled + torch.randn(sum(LENGTHS), dtype=torch.float64)).requires_grad_(), sampled


def truncated(ratio, advantage, log_prob):
    return -min(ratio.item(), 2.0) * advantage * log_prob, ratio.item() > 2


def clipped(low, high):
    def loss(ratio, advantage, log_prob):
        bound = 1 + high if advantage > 0 else 1 - low
        is_clipped = (ratio.item() - bound) * advantage > 0
        return -advantage * (torch.tensor(bound, dtype=torch.float64) if is_clipped else ratio), is_clipped

    return loss


@pytest.mark.parametrize(
    ("loss", "of_token", "of_sequences"),
    [
        (PolicyGradient(), truncated, False),
        (ClippedPolicy(), clipped(0.2, 0.28), False),
        (ClippedPolicy(low=0.5, high=0.1), clipped(0.5, 0.1), False),
        (GSPO(), clipped(3e-4, 4e-4), True),
        (GSPO(low=0.03, high=0.05), clipped(0.03, 0.05), True),
    ],
)
def test_policy_losses_match_their_formulas(loss, of_token, of_sequences, batch):
    log_probs, sampled = values()
    advantages = torch.tensor([1.5, -0.7, 0.4, -1.1], dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    expected = []
    for document, length in enumerate(LENGTHS):
        tokens = range(sum(LENGTHS[:document]), sum(LENGTHS[: document + 1]))
        mean = sum(log_probs[at] - sampled[at] for at in tokens) / length
        for at in tokens:
            ratio = (mean if of_sequences else log_probs[at] - sampled[at]).exp()
            expected.append(of_token(ratio, advantages[at].item(), log_probs[at]))
    losses, is_clipped = loss(log_probs, sampled, advantages, batch)
    terms = torch.stack([torch.as_tensor(term) for term, _ in expected])
    assert_close(losses, terms)
    assert is_clipped.tolist() == [is_cut for _, is_cut in expected]
    assert 0 < sum(is_clipped) < len(is_clipped)
    assert_close(*(torch.autograd.grad(values.sum(), log_probs, retain_graph=True)[0] for values in (losses, terms)))


@pytest.mark.parametrize("loss", [PolicyGradient(), ClippedPolicy(), GSPO()])
def test_on_policy_gradients_equal_reinforce(loss, batch):
    log_probs, _ = values()
    advantages = of_tokens("advantage", batch).double()
    losses, is_clipped = loss(log_probs, log_probs.detach(), advantages, batch)
    assert not is_clipped.any()
    assert_close(torch.autograd.grad(losses.sum(), log_probs)[0], -advantages)


def test_policy_losses_of_no_tokens():
    batch = Batch.of(torch.zeros(1, 4, dtype=torch.long))
    empty = torch.zeros(0, requires_grad=True)
    for loss in (PolicyGradient(), ClippedPolicy(), GSPO()):
        losses, is_clipped = loss(empty, empty.detach(), empty.detach(), batch)
        assert losses.shape == is_clipped.shape == (0,)
        losses.sum().backward()


def test_kl_estimate_is_unbiased():
    torch.manual_seed(0)
    p, q = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    mean = (p.exp() * kl_estimate(p, q)).sum()
    assert mean.item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-12)
    assert (kl_estimate(p, q) >= 0).all()
    assert kl_estimate(p[:1], p[:1] - math.log(2)).item() == pytest.approx(math.log(2) - 0.5)


def test_columns_of_tokens(batch):
    assert of_tokens("sampled", batch).tolist() == [1, 2, 3, 4, 5, 12, 13, 15, 16, 17, 18, 19]
    of_documents = torch.tensor([1.5, -0.7, 0.4, -1.1]).repeat_interleave(torch.tensor(LENGTHS))
    assert_close(of_tokens("advantage", batch), of_documents)
