"""Divergences equal torch's `kl_div` of full logits, without computing the full logits."""

import pytest
import torch
import torch.nn.functional as F
from losses.operands import Largest, make
from torch.testing import assert_close

from tune.collators import Batch
from tune.losses import ForwardKL, JensenShannon, MostProbable, ReverseKL, Teacher, TopK


def kl(p, q):
    """KL(p || q) of log-probs, summed."""
    return F.kl_div(q, p, reduction="sum", log_target=True)


def jensen_shannon(student, teacher, beta=0.3):
    mixture = torch.logaddexp(teacher + torch.tensor(beta).log(), student + torch.tensor(1 - beta).log())
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


FORMULAS = {
    ForwardKL: lambda student, teacher: kl(teacher, student),
    ReverseKL: kl,
    JensenShannon: jensen_shannon,
}
OPTIONS = {JensenShannon: {"beta": 0.3}}
divergences = pytest.mark.parametrize("divergence", FORMULAS)


def operands(scale=1.0, teacher_vocabulary=97, dtype=torch.float32):
    """The operands of `make`, and a teacher of another width."""
    hidden, weight, labels = make(dtype)
    generator = torch.Generator().manual_seed(1)
    teacher = Teacher(
        (torch.randn(*hidden.shape[:2], 24, generator=generator) * scale).to(dtype).requires_grad_(),
        (torch.randn(teacher_vocabulary, 24, generator=generator) * 0.3).to(dtype).requires_grad_(),
        None,
    )
    return hidden * scale, weight, labels, teacher


def log_softmax(hidden, weight, labels, softcap=None, temperature=1.0):
    logits = (hidden.double() @ weight.double().T)[labels != -100]
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    return (logits / temperature).log_softmax(-1)


def check(loss, expected, hidden, weight):
    assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    ours, exact = (
        torch.autograd.grad(value / 40, (hidden, weight), retain_graph=value is expected) for value in (loss, expected)
    )
    for gradient, reference in zip(ours, exact, strict=True):
        assert reference.norm() > 1e-4
        assert (gradient - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@divergences
def test_value_and_gradients(divergence, softcap, temperature, share):
    hidden, weight, labels, teacher = operands()
    teacher = teacher._replace(softcap=2.0 if softcap else None)
    student_log_p = log_softmax(hidden, weight, labels, softcap, temperature)
    teacher_log_p = log_softmax(*teacher[:2], labels, teacher.softcap, temperature)
    expected = FORMULAS[divergence](student_log_p, teacher_log_p)
    if share:
        cross_entropy = F.nll_loss(
            log_softmax(hidden, weight, labels, softcap), labels[labels != -100], reduction="sum"
        )
        expected = (1 - share) * temperature**2 * expected + share * cross_entropy
    for chunk_tokens in (7, None):
        loss_fn = divergence(temperature, share, chunk_tokens, **OPTIONS.get(divergence, {}))
        loss = loss_fn(hidden, weight, Batch.of(labels, labels), teacher=teacher, softcap=softcap)
        check(loss, expected, hidden, weight)


@pytest.mark.parametrize(("vocab_size", "used"), [(None, 97), (95, 95)])
@pytest.mark.parametrize("teacher_vocabulary", [97 + 8, 97])
@divergences
def test_padded_vocabularies(divergence, teacher_vocabulary, vocab_size, used):
    """Rows beyond the tokenizer's ids are ignored if the heads have different numbers of them."""
    hidden, weight, labels, teacher = operands(teacher_vocabulary=teacher_vocabulary)
    labels[labels >= 95] = 0
    used = used if teacher_vocabulary != 97 else 97
    loss_fn = divergence(vocab_size=vocab_size, **OPTIONS.get(divergence, {}))
    loss = loss_fn(hidden, weight, Batch.of(labels, labels), teacher=teacher)
    student_log_p = log_softmax(hidden, weight[:used], labels)
    check(
        loss,
        FORMULAS[divergence](student_log_p, log_softmax(teacher.hidden, teacher.weight[:used], labels)),
        hidden,
        weight,
    )


def test_jensen_shannon_weights_both_sides_equally_by_default():
    hidden, weight, labels, teacher = operands()
    student_log_p, teacher_log_p = log_softmax(hidden, weight, labels), log_softmax(*teacher[:2], labels)
    loss = JensenShannon()(hidden, weight, Batch.of(labels, labels), teacher=teacher)
    assert_close(loss.double(), jensen_shannon(student_log_p, teacher_log_p, beta=0.5), rtol=1e-5, atol=0)


@divergences
def test_divergence_from_itself_is_zero(divergence):
    hidden, weight, labels = make()
    loss_fn = divergence(**OPTIONS.get(divergence, {}))
    batch = Batch.of(labels, labels)
    loss = loss_fn(hidden, weight, batch, teacher=Teacher(hidden, weight, None))
    loss.backward()
    assert loss.abs() < 1e-6 and max(weight.grad.abs().max(), hidden.grad.abs().max()) < 1e-6
    # Small divergences are not lost to rounding. Only the rounding of each row's normalizer remains, about 1e-6 in
    # total, depending on the order of sums; the difference of two sums over the vocabulary would be off by 1e-5.
    nearby = Teacher(hidden.detach() * 1.02, weight.detach(), None)
    exact = FORMULAS[divergence](log_softmax(hidden, weight, labels), log_softmax(*nearby[:2], labels))
    assert 2e-3 < exact < 2e-2
    assert_close(loss_fn(hidden, weight, batch, teacher=nearby).double(), exact, rtol=0, atol=5e-6)


@divergences
def test_probabilities_of_zero(divergence):
    """In fp32, probabilities of the teacher, the student or both may be zero."""
    hidden, weight, labels, teacher = operands(scale=100)
    student_log_p, teacher_log_p = log_softmax(hidden, weight, labels), log_softmax(*teacher[:2], labels)
    assert torch.maximum(student_log_p, teacher_log_p).exp().float().min() == 0
    loss_fn = divergence(**OPTIONS.get(divergence, {}))
    loss = loss_fn(hidden, weight, Batch.of(labels, labels), teacher=teacher)
    expected = FORMULAS[divergence](student_log_p, teacher_log_p)
    assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    ours, exact = (torch.autograd.grad(value, weight)[0] for value in (loss, expected))
    assert (ours - exact).norm() <= 1e-3 * exact.norm()  # logits of hundreds have errors of 1e-5


@divergences
def test_teacher_gets_no_gradient(divergence):
    hidden, weight, labels, teacher = operands()
    divergence()(hidden, weight, Batch.of(labels, labels), teacher=teacher).backward()
    assert teacher.hidden.grad is None and teacher.weight.grad is None and weight.grad is not None


@divergences
def test_bf16_is_close_to_the_formula(divergence):
    hidden, weight, labels, teacher = operands(dtype=torch.bfloat16)
    loss_fn = divergence(chunk_tokens=7, **OPTIONS.get(divergence, {}))
    loss = loss_fn(hidden, weight, Batch.of(labels, labels), teacher=teacher)
    expected = FORMULAS[divergence](log_softmax(hidden, weight, labels), log_softmax(*teacher[:2], labels))
    assert loss.dtype == torch.float32
    assert_close(loss.double(), expected, rtol=1e-2, atol=0)
    for ours, exact in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        assert (ours - exact).norm() <= 0.01 * exact.norm()


@divergences
def test_full_logits_are_never_materialized(divergence):
    hidden, weight, labels = make(tokens=2000)
    teacher = Teacher(hidden.detach(), weight.detach(), None)
    with Largest() as largest:
        divergence(chunk_tokens=10)(hidden, weight, Batch.of(labels, labels), teacher=teacher).backward()
    assert largest.elements == hidden.numel() < len(labels.flatten()) * len(weight)


@divergences
def test_no_supervised_tokens_give_zero(divergence):
    hidden, weight, labels, teacher = operands()
    loss = divergence()(hidden, weight, Batch.of(labels), teacher=teacher)
    loss.backward()
    assert loss == 0 and weight.grad.abs().max() == 0


def stored(teacher, labels, k, **options):
    """The predictions that a dataset would return for the `k` most probable ids."""
    batch = Batch.of(labels, labels)
    values = MostProbable(k, chunk_tokens=7, **options)(teacher.hidden, teacher.weight, batch, softcap=teacher.softcap)
    column = torch.zeros(*labels.shape, 2 * k + 1)
    column[labels != -100] = values
    return TopK.stored(column, batch)


def bucketed(log_p, ids):
    """The log-probs of `ids`, and the log-prob of all other ids together."""
    others = log_p.exp().scatter(1, ids, 0).sum(dim=1, keepdim=True)
    return torch.cat([log_p.gather(1, ids), others.log()], dim=1)


@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (2.5, None), (1.0, 1.5)])
@pytest.mark.parametrize("k", [1, 5, 60])
@divergences
def test_stored_predictions_match_the_bucketed_formula(divergence, k, temperature, softcap, share):
    """All other ids are one bucket for student and teacher."""
    hidden, weight, labels, teacher = operands(teacher_vocabulary=105)
    teacher = teacher._replace(softcap=2.0 if softcap else None)
    kept = stored(teacher, labels, k, temperature=temperature, vocab_size=97)
    teacher_log_p = log_softmax(teacher.hidden, teacher.weight[:97], labels, teacher.softcap, temperature)
    ids = teacher_log_p.topk(k).indices
    assert torch.equal(kept.ids, ids)
    assert_close(kept.log_probs.double(), bucketed(teacher_log_p, ids), rtol=1e-5, atol=1e-6)
    student_log_p = log_softmax(hidden, weight, labels, softcap, temperature)
    expected = FORMULAS[divergence](bucketed(student_log_p, ids), bucketed(teacher_log_p, ids).detach())
    if share:
        log_p = log_softmax(hidden, weight, labels, softcap)
        expected = (1 - share) * temperature**2 * expected + share * F.nll_loss(
            log_p, labels[labels != -100], reduction="sum"
        )
    loss_fn = divergence(temperature, share, 7, **OPTIONS.get(divergence, {}))
    loss = loss_fn(hidden, weight, Batch.of(labels, labels), teacher=kept, softcap=softcap)
    check(loss, expected, hidden, weight)


@pytest.mark.parametrize("k", [5, 95])
@divergences
def test_stored_predictions_of_padded_vocabularies(divergence, k):
    """The padding of the student is ignored like that of the teacher."""
    hidden, weight, labels, teacher = operands()
    labels[labels >= 95] = 0
    kept = stored(teacher, labels, k, vocab_size=95)
    student_log_p, teacher_log_p = log_softmax(hidden, weight[:95], labels), kept.log_probs.double()
    expected = FORMULAS[divergence](bucketed(student_log_p, kept.ids)[:, : min(k + 1, 95)], teacher_log_p[:, :95])
    loss_fn = divergence(vocab_size=95, **OPTIONS.get(divergence, {}))
    check(loss_fn(hidden, weight, Batch.of(labels, labels), teacher=kept), expected, hidden, weight)


@divergences
def test_storing_all_predictions_matches_the_whole_teacher(divergence):
    """The bucket of other ids is empty, but its log-prob is finite."""
    hidden, weight, labels, teacher = operands()
    kept = stored(teacher, labels, 97)
    assert kept.log_probs[:, -1].isfinite().all()
    loss_fn = divergence(**OPTIONS.get(divergence, {}))
    loss = loss_fn(hidden, weight, Batch.of(labels, labels), teacher=kept)
    expected = FORMULAS[divergence](log_softmax(hidden, weight, labels), log_softmax(*teacher[:2], labels))
    check(loss, expected, hidden, weight)


@pytest.mark.parametrize("share", [0.0, 0.25])
@divergences
def test_weights_of_tokens(divergence, share):
    """The weights of a Batch multiply the loss of each token."""
    hidden, weight, labels, teacher = operands()
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2))
    student_log_p, teacher_log_p = (log_softmax(*head[:2], labels) for head in ((hidden, weight), teacher))
    targets, of_labels = labels[labels != -100], weights[labels != -100].double()
    expected = sum(
        factor * ((1 - share) * FORMULAS[divergence](student[None], of_teacher[None]) - share * student[target])
        for factor, student, of_teacher, target in zip(of_labels, student_log_p, teacher_log_p, targets, strict=True)
    )
    loss_fn = divergence(1.0, share, 7, **OPTIONS.get(divergence, {}))
    loss = loss_fn(hidden, weight, Batch.of(labels, labels, weights=weights), teacher=teacher)
    check(loss, expected, hidden, weight)
