"""LogProbs equals autograd on the log-softmax of full logits, without computing the full logits."""

from pathlib import Path

import pytest
import torch
from helpers import run_processes
from losses.operands import Largest, make
from torch.testing import assert_close

from tune.collators import Batch
from tune.losses import LinearCrossEntropy, LogProbs, per_document


def reference(hidden, weight, labels, softcap=None, temperature=1.0):
    """Log-probs of the labels, entropies and whether labels are the argmax, in fp64."""
    logits = (hidden.double() @ weight.double().T)[labels != -100]
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    labels = labels[labels != -100]
    return distribution.log_prob(labels), distribution.entropy(), logits.argmax(-1) == labels


def weights_of(tokens):
    """Factors of either sign for each token, as a loss might multiply log-probs with."""
    return torch.linspace(-2, 1, tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 40, None])
def test_values_and_gradients(chunk_tokens, softcap, temperature):
    hidden, weight, labels = make()
    labels[1, :5] = (hidden[1, :5] @ weight.T).argmax(-1)
    values = LogProbs(chunk_tokens, temperature)(hidden, weight, Batch.of(labels, labels), softcap=softcap)
    log_probs, entropies, is_argmax = reference(hidden, weight, labels, softcap, temperature)
    assert_close(values.log_probs.double(), log_probs, rtol=1e-5, atol=1e-6)
    assert_close(values.entropies.double(), entropies.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(values.is_argmax, is_argmax) and 5 <= is_argmax.sum() < 40
    assert not values.entropies.requires_grad and not values.log_probs._is_view()  # FSDP warns of views
    factors = weights_of(40)
    for ours, exact in zip(
        torch.autograd.grad((values.log_probs.exp() * factors).sum(), (hidden, weight)),
        torch.autograd.grad((log_probs.exp() * factors).sum(), (hidden, weight)),
        strict=True,
    ):
        assert (ours - exact).norm() <= 1e-6 * exact.norm()


def test_large_logits_stay_exact():
    """The exponentials of the largest logits are infinite in fp32, and the smallest are 0."""
    hidden, weight, labels = make()
    values = LogProbs(7)(hidden * 200, weight, Batch.of(labels, labels))
    log_probs, entropies, _ = reference(hidden * 200, weight, labels)
    assert log_probs.min() < -200
    assert_close(values.log_probs.double(), log_probs, rtol=1e-5, atol=1e-4)
    assert_close(values.entropies.double(), entropies, rtol=1e-4, atol=1e-5)


def test_bf16_sums_in_fp32():
    hidden, weight, labels = make(torch.bfloat16, tokens=2000)
    log_probs = LogProbs(64)(hidden, weight, Batch.of(labels, labels)).log_probs
    assert log_probs.dtype == torch.float32
    gradients = torch.autograd.grad(log_probs @ weights_of(len(log_probs)), (hidden, weight))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected, _, _ = reference(*exact, labels)
    assert_close(log_probs.double(), expected, rtol=1e-2, atol=2e-2)  # logits are rounded to bf16
    for ours, reference_gradient in zip(
        gradients, torch.autograd.grad(expected @ weights_of(len(expected)).double(), exact), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - reference_gradient).norm() <= 0.005 * reference_gradient.norm()


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_gradient_of_a_single_operand(trained):
    hidden, weight, labels = make()
    inputs = {"hidden": hidden, "weight": weight}
    operands = [tensor if name == trained else tensor.detach() for name, tensor in inputs.items()]
    ours = LogProbs(7)(*operands, Batch.of(labels, labels)).log_probs @ weights_of(40)
    exact = reference(*operands, labels)[0] @ weights_of(40).double()
    assert_close(*(torch.autograd.grad(value, inputs[trained])[0] for value in (ours, exact)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_full_logits_are_never_materialized():
    hidden, weight, labels = make(tokens=2000)
    with Largest() as largest:
        LogProbs(10)(hidden, weight, Batch.of(labels, labels)).log_probs.sum().backward()
    assert largest.elements == hidden.numel() < len(labels.flatten()) * len(weight)


@pytest.mark.parametrize("head", [LogProbs(), LinearCrossEntropy()])
def test_unneeded_gradients_are_not_computed(head):
    """No gradient is computed in evaluation, although the weight is a parameter, nor for a frozen weight."""
    hidden, weight, labels = make()
    with Largest() as largest, torch.no_grad():
        head(hidden, weight, Batch.of(labels, labels))
    assert largest.products == 1
    with Largest() as largest:
        result = head(hidden, weight.detach(), Batch.of(labels, labels))
        (result.log_probs.sum() if isinstance(head, LogProbs) else result).backward()
    assert largest.products == 2


def test_per_document_sums():
    hidden, weight, labels = make()
    documents = torch.tensor([[0] * 3 + [1] * 20 + [2] * 2, [3] * 10 + [4] * 15])
    batch = Batch.of(labels, labels, documents)
    log_probs = LogProbs(7)(hidden, weight, batch).log_probs
    sums = per_document(log_probs, batch)
    exact = torch.zeros(labels.shape, dtype=torch.float64)
    exact[labels != -100] = reference(hidden, weight, labels)[0]
    expected = torch.stack([exact[documents == document].sum() for document in range(5)])
    assert expected[0] == 0  # no token of it is supervised
    assert_close(sums.double(), expected, rtol=1e-5, atol=1e-6)
    factors = torch.arange(5.0)
    assert_close(
        *(torch.autograd.grad(value @ factors.to(value.dtype), hidden)[0] for value in (sums, expected)),
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip


def test_no_supervised_tokens_give_zero():
    hidden, weight, labels = make()
    batch = Batch.of(labels)
    values = LogProbs()(hidden, weight, batch)
    assert [len(tensor) for tensor in values] == [0, 0, 0] and per_document(values.log_probs, batch).tolist() == [0, 0]
    values.log_probs.sum().backward()
    assert weight.grad.abs().max() == 0 and hidden.grad.abs().max() == 0


@pytest.mark.slow
def test_sharded_log_probs(checkpoint, tied_checkpoint):
    """FSDP gathers the weight for a head with several outputs, and again for its backward."""
    script = Path(__file__).with_name("sharded_log_probs.py")
    assert "2 processes agree" in run_processes(script, 2, str(checkpoint), str(tied_checkpoint))
