"""Each loss matches the formula of TRL 1.16 in fp64, also for certain or very long answers."""

import math

import pytest
import torch
from torch.testing import assert_close

from tune import losses
from tune.collators import Batch
from tune.errors import TuneError
from tune.losses import CPO, DPO, IPO, KTO, ORPO, AnswerLogProbs, SimPO


def log_s(x):
    return -torch.log1p(torch.exp(-x))


def log_odds(a):
    return a - torch.log1p(-torch.exp(a))


# Log-probs c and r of the chosen and the rejected answers, ref_c and ref_r under the reference; len_c and len_r tokens.
FORMULAS = {
    DPO: lambda c, r, ref_c, ref_r, len_c, len_r: -log_s(0.1 * ((c - ref_c) - (r - ref_r))),
    IPO: lambda c, r, ref_c, ref_r, len_c, len_r: ((c - ref_c) / len_c - (r - ref_r) / len_r - 1 / (2 * 0.1)) ** 2,
    SimPO: lambda c, r, ref_c, ref_r, len_c, len_r: -log_s(2 * (c / len_c - r / len_r - 1 / 2)),
    CPO: lambda c, r, ref_c, ref_r, len_c, len_r: -log_s(0.1 * (c - r)) - c / len_c,
    ORPO: lambda c, r, ref_c, ref_r, len_c, len_r: -c / len_c - 0.1 * log_s(log_odds(c / len_c) - log_odds(r / len_r)),
}
OPTIONS = [
    (DPO(beta=0.7), lambda c, r, ref_c, ref_r, len_c, len_r: -log_s(0.7 * ((c - ref_c) - (r - ref_r)))),
    (
        DPO(label_smoothing=0.2),
        lambda c, r, ref_c, ref_r, len_c, len_r: (
            -0.8 * log_s(0.1 * ((c - ref_c) - (r - ref_r))) - 0.2 * log_s(-0.1 * ((c - ref_c) - (r - ref_r)))
        ),
    ),
    (
        DPO(beta=5.0, length_normalized=True),
        lambda c, r, ref_c, ref_r, len_c, len_r: -log_s(5 * ((c - ref_c) / len_c - (r - ref_r) / len_r)),
    ),
    (IPO(beta=0.5), lambda c, r, ref_c, ref_r, len_c, len_r: ((c - ref_c) / len_c - (r - ref_r) / len_r - 1) ** 2),
    (SimPO(beta=3.0, gamma=0.6), lambda c, r, ref_c, ref_r, len_c, len_r: -log_s(3 * (c / len_c - r / len_r) - 0.6)),
    (CPO(beta=0.5, nll=0.3), lambda c, r, ref_c, ref_r, len_c, len_r: -log_s(0.5 * (c - r)) - 0.3 * c / len_c),
    (
        ORPO(beta=0.7),
        lambda c, r, ref_c, ref_r, len_c, len_r: -c / len_c - 0.7 * log_s(log_odds(c / len_c) - log_odds(r / len_r)),
    ),
    *((loss(), formula) for loss, formula in FORMULAS.items()),
]
REWARDS = {  # of the answers c
    DPO: lambda c, ref_c, len_c: 0.1 * (c - ref_c),
    IPO: lambda c, ref_c, len_c: 0.1 * (c - ref_c) / len_c,
    SimPO: lambda c, ref_c, len_c: 2 * c / len_c,
    CPO: lambda c, ref_c, len_c: 0.1 * c,
    ORPO: lambda c, ref_c, len_c: 0.1 * c / len_c,
    KTO: lambda c, ref_c, len_c: 0.1 * (c - ref_c),
}


def answers(seed, pairs=9):
    """Log-probs of answers of 1 to 30 tokens under two similar models."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (pairs,), generator=draw)
    policy = -lengths * (0.05 + 2 * torch.rand(pairs, generator=draw))
    reference = policy + torch.randn(pairs, generator=draw)
    return AnswerLogProbs(policy.requires_grad_(), reference, lengths)


def exact(ours):
    return AnswerLogProbs(ours.policy.detach().double().requires_grad_(), ours.reference.double(), ours.lengths)


@pytest.mark.parametrize(("loss", "formula"), OPTIONS, ids=lambda value: type(value).__name__)
def test_loss_and_gradients_match_the_formula(loss, formula):
    ours = answers(0), answers(1)
    c, r = map(exact, ours)
    expected = formula(c.policy, r.policy, c.reference, r.reference, c.lengths, r.lengths)
    actual = loss(*ours)
    assert actual.shape == (9,) and actual.dtype == torch.float32
    assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(actual.sum(), [side.policy for side in ours])
    for one, other in zip(gradients, torch.autograd.grad(expected.sum(), [c.policy, r.policy]), strict=True):
        assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kl", [0.8, -0.4])
def test_kto_matches_its_formula_and_its_kl_gets_no_gradient(kl):
    ours, loss = answers(0), KTO(beta=0.3, desirable=1.5, undesirable=0.7)
    is_good = torch.arange(9) % 2 == 0
    mismatched = torch.tensor(kl)
    actual = loss(ours, is_good, mismatched)
    theirs = exact(ours)
    ratio, z = theirs.policy - theirs.reference, max(0, kl)
    good, bad = 1.5 * (1 - torch.sigmoid(0.3 * (ratio - z))), 0.7 * (1 - torch.sigmoid(0.3 * (z - ratio)))
    expected = torch.where(is_good, good, bad)
    assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(values.sum(), of)[0] for values, of in ((actual, ours.policy), (expected, theirs.policy))
    ]
    assert_close(gradients[0].double(), gradients[1], rtol=1e-4, atol=1e-6)
    assert (gradients[0][is_good] < 0).all() and (gradients[0][~is_good] > 0).all()


@pytest.mark.parametrize("loss", REWARDS)
def test_reward_matches_its_formula(loss):
    ours = answers(0)
    theirs = exact(ours)
    expected = REWARDS[loss](theirs.policy, theirs.reference, theirs.lengths)
    assert_close(loss().reward(ours).double(), expected, rtol=1e-5, atol=1e-6)
    # Preferred answers have the higher reward: the loss falls when the rewards of chosen answers rise.
    if loss is not KTO:
        (gradient,) = torch.autograd.grad(loss()(ours, answers(1)).sum(), ours.policy)
        assert (gradient <= 0).all() and gradient.sum() < 0


EXTREMES = {  # log-prob per token, and number of tokens
    "certain": (0.0, 3),
    "above certain by rounding": (1e-7, 3),
    "nearly certain": (-1e-12, 3),
    "one in a million": (-1e-6, 1),
    "impossible": (-1e4, 2),
    "long": (-3.0, 100_000),
    "one token": (-0.7, 1),
}


@pytest.mark.parametrize("loss", REWARDS, ids=lambda loss: loss.__name__)
def test_losses_of_extreme_answers_are_finite(loss):
    per_token, lengths = map(torch.tensor, zip(*EXTREMES.values(), strict=True))
    policy = (per_token * lengths).requires_grad_()
    sides_of_pairs = torch.cartesian_prod(torch.arange(len(lengths)), torch.arange(len(lengths))).T
    every = AnswerLogProbs(policy, torch.zeros(len(lengths)), lengths)
    if loss is KTO:
        sides = torch.ones(len(lengths), dtype=torch.bool), torch.zeros(len(lengths), dtype=torch.bool)
        values = torch.stack([KTO()(every, is_good, torch.tensor(9.0)) for is_good in sides])
    else:
        values = loss()(every.at(sides_of_pairs[0]), every.at(sides_of_pairs[1]))
    assert values.isfinite().all()
    values.sum().backward()
    assert policy.grad.isfinite().all()


def test_orpo_keeps_its_gradient_for_likely_answers():
    """In fp32, 1 - exp(log p) is 0 long before log p is; both branches of log(1 - p) are needed."""
    for per_token in (-1e-4, -1e-2, -0.5, -0.69, -0.71, -2.0, -20.0):
        policy = torch.tensor([per_token * 4], requires_grad=True)
        other = AnswerLogProbs(torch.tensor([-4.0]), None, torch.tensor([4]))
        loss = ORPO(beta=1.0)(AnswerLogProbs(policy, None, torch.tensor([4])), other)
        loss.backward()
        a, b = per_token, -1.0
        odds = a - math.log(-math.expm1(a)) - (b - math.log(-math.expm1(b)))
        assert loss.item() == pytest.approx(-a + math.log1p(math.exp(-odds)), rel=1e-4, abs=1e-6)
        slope = 1 / -math.expm1(a)  # of the log odds
        assert policy.grad.item() == pytest.approx((-1 - slope / (1 + math.exp(odds))) / 4, rel=1e-3)


def test_reference_free_losses_need_no_reference():
    ours = [AnswerLogProbs(side.policy, None, side.lengths) for side in (answers(0), answers(1))]
    for loss in (SimPO, CPO, ORPO):
        assert not loss.needs_reference
        assert torch.equal(loss()(*ours), loss()(answers(0), answers(1)))
    assert DPO.needs_reference and IPO.needs_reference and KTO.needs_reference


def test_pairs_combine_the_first_answer_of_a_group_with_each_other():
    answer = torch.tensor([0, 1, 0, 1, 2, 3, 0, 1])
    labels = torch.ones(1, 8, dtype=torch.long)
    first, others = Batch.of(labels, labels, torch.arange(8)[None], columns={"answer": answer}).pairs
    assert first.tolist() == [0, 2, 2, 2, 6] and others.tolist() == [1, 3, 4, 5, 7]


def test_metrics_of_pairs_and_labeled_answers():
    chosen, rejected = answers(0), answers(1)
    metrics = {
        name: (total / count).item() for name, (total, count) in losses.of_pairs(DPO(), chosen, rejected).items()
    }
    rewards = [0.1 * (side.policy - side.reference) for side in (chosen, rejected)]
    assert metrics == pytest.approx(
        {
            "rewards/chosen": rewards[0].mean().item(),
            "rewards/rejected": rewards[1].mean().item(),
            "rewards/margins": (rewards[0] - rewards[1]).mean().item(),
            "rewards/accuracies": (rewards[0] > rewards[1]).float().mean().item(),
            "logps/chosen": chosen.policy.mean().item(),
            "logps/rejected": rejected.policy.mean().item(),
        },
        rel=1e-5,
    )
    # As in TRL, a tie is not a win: before the first step all rewards are 0.
    tied = losses.of_rewards(torch.tensor([0.0, 0.5, 0.0]), torch.tensor([0.0, 0.5, 1.0]))
    assert tied["rewards/accuracies"].tolist() == [0, 3]
    is_good = torch.arange(9) < 4
    metrics = losses.of_labelled(KTO(), chosen, is_good)
    assert {name: count.item() for name, (_, count) in metrics.items()} == {
        "rewards/chosen": 4, "rewards/rejected": 5, "logps/chosen": 4, "logps/rejected": 5
    }  # fmt: skip
    assert metrics["rewards/chosen"][0].item() == pytest.approx(rewards[0][:4].sum().item(), rel=1e-5)
    assert metrics["logps/rejected"][0].item() == pytest.approx(chosen.policy[4:].sum().item(), rel=1e-5)


class Bare:
    """A pair loss without any of the attributes that recipes need."""

    def __call__(self, chosen, rejected):
        return rejected.ratio - chosen.ratio


def test_missing_attributes_of_a_custom_loss_are_named():
    loss_fn, names = Bare(), ("needs_reference", "reward")
    for name, value in (
        ("needs_reference", False),
        ("reward", lambda answers: answers.policy),
    ):
        with pytest.raises(TuneError, match=rf"Bare has no `{name}`"):
            losses.require_attributes(loss_fn, *names)
        setattr(loss_fn, name, value)
    losses.require_attributes(loss_fn, *names)
    with pytest.raises(TuneError, match="needs_reference = True"):  # the error names the attribute to set
        loss_fn(AnswerLogProbs(torch.zeros(2)), AnswerLogProbs(torch.zeros(2)))
    with pytest.raises(TuneError, match="of_function has no `needs_reference`"):
        losses.require_attributes(of_function, *names)


def of_function(chosen, rejected):
    return rejected.ratio - chosen.ratio
