"""LinearCrossEntropy equals torch's cross-entropy of full logits, without computing the full logits."""

import pytest
import torch
import torch.nn.functional as F
from losses.operands import make
from torch.testing import assert_close

from tune.collators import Batch
from tune.losses import LinearCrossEntropy
from tune.losses.chunks import default_chunk_tokens


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 40, None])
def test_value_and_gradients(chunk_tokens, softcap):
    hidden, weight, labels = make()
    logits = hidden @ weight.T
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = LinearCrossEntropy(chunk_tokens)(hidden, weight, Batch.of(labels, labels), softcap=softcap)
    assert_close(loss, expected, rtol=1e-6, atol=0)
    scale = 1 / 40  # recipes divide by the number of supervised tokens
    for ours, reference in zip(
        torch.autograd.grad(loss * scale, (hidden, weight)),
        torch.autograd.grad(expected * scale, (hidden, weight)),
        strict=True,
    ):
        assert (ours - reference).norm() <= 1e-6 * reference.norm()


def test_bf16_sums_in_fp32():
    hidden, weight, labels = make(torch.bfloat16, tokens=2000)
    loss = LinearCrossEntropy(64)(hidden, weight, Batch.of(labels, labels))
    logits = (hidden @ weight.T).float()
    assert loss.dtype == torch.float32
    assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(loss, weight)
    exact_hidden, exact_weight = hidden.detach().double(), weight.detach().double().requires_grad_()
    exact = F.cross_entropy((exact_hidden @ exact_weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    (reference,) = torch.autograd.grad(exact, exact_weight)
    assert gradient.dtype == torch.bfloat16
    assert (gradient.double() - reference).norm() <= 0.003 * reference.norm()  # 0.0021; summed in bf16, 0.0062


def test_large_logits_stay_exact():
    """The exponentials of the logits are infinite in fp32."""
    hidden, weight, labels = make()
    loss = LinearCrossEntropy(7)(hidden * 200, weight, Batch.of(labels, labels))
    expected = F.cross_entropy((hidden * 200 @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    assert (hidden * 200 @ weight.T).max() > 200
    assert_close(loss, expected, rtol=1e-6, atol=0)
    gradients = (torch.autograd.grad(value, hidden)[0] for value in (loss, expected))
    assert_close(*gradients, rtol=1e-4, atol=1e-3)


def test_frozen_weight_gets_no_gradient():
    hidden, weight, labels = make()
    loss = LinearCrossEntropy()(hidden, weight.detach(), Batch.of(labels, labels))
    reference = F.cross_entropy((hidden @ weight.detach().T).flatten(0, 1), labels.flatten(), reduction="sum")
    assert_close(torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(reference, hidden)[0], rtol=1e-5, atol=1e-6)


def test_no_supervised_tokens_give_zero_not_nan():
    hidden, weight, labels = make()
    loss = LinearCrossEntropy()(hidden, weight, Batch.of(labels))
    loss.backward()
    assert loss.item() == 0 and weight.grad.abs().max() == 0 and hidden.grad.abs().max() == 0


@pytest.mark.parametrize("chunk_tokens", [7, None])
def test_accuracy_accumulates_supervised_tokens_over_calls(chunk_tokens):
    hidden, weight, labels = make()
    is_supervised = labels != -100
    predicted = (hidden @ weight.T).argmax(dim=-1)
    labels[:, ::3] = predicted[:, ::3].where(is_supervised[:, ::3], -100)
    right, supervised = (predicted == labels).sum().item(), is_supervised.sum().item()
    assert 0 < right < supervised < labels.numel()
    loss_fn = LinearCrossEntropy(chunk_tokens, accuracy=True)
    for calls in (1, 2):
        loss_fn(hidden, weight, Batch.of(labels, labels))
        assert loss_fn.counts.tolist() == [calls * right, calls * supervised]


def test_chunk_of_logits_has_half_a_gib_on_a_gpu():
    sizes = {vocabulary: default_chunk_tokens(vocabulary, "cuda") for vocabulary in (32_000, 10**6)}
    assert sizes == {32_000: 2**29 // (32_000 * 4) // 128 * 128, 10**6: 512}
    assert default_chunk_tokens(32_000, "cpu") == 512


@pytest.mark.parametrize("chunk_tokens", [7, None])
def test_weights_of_tokens(chunk_tokens):
    hidden, weight, labels = make()
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1))
    logits = (hidden @ weight.T).flatten(0, 1)
    of_tokens = F.cross_entropy(logits, labels.flatten(), reduction="none")
    expected = (of_tokens * weights.flatten()).sum()
    loss = LinearCrossEntropy(chunk_tokens)(hidden, weight, Batch.of(labels, labels, weights=weights))
    assert_close(loss, expected, rtol=1e-6, atol=0)
    ours, theirs = (torch.autograd.grad(value / 40, (hidden, weight)) for value in (loss, expected))
    for gradient, reference in zip(ours, theirs, strict=True):
        assert (gradient - reference).norm() <= 1e-6 * reference.norm()
