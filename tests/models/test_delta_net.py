"""The chunked delta rule matches its definition token by token."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from tune.models import delta_net
from tune.models.delta_net import CHUNK, DeltaNet, gated_delta_rule

HEADS, KEY_DIM, VALUE_DIM = 2, 8, 6
NAMES = ("query", "key", "value", "log_decay", "strength")


def token_by_token(query, key, value, log_decay, strength, documents, memory):
    outputs = []
    for index in range(key.shape[1]):
        q, k, v = (tensor[:, index, :, :, None] for tensor in (query, key, value))
        begins = documents[:, index] != (documents[:, index - 1] if index else 0)
        memory = memory * log_decay[:, index, :, None, None].exp() * ~begins[:, None, None, None]
        memory = memory + strength[:, index, :, None, None] * k @ (v - memory.mT @ k).mT
        outputs.append((memory.mT @ q)[..., 0])
    return torch.stack(outputs, dim=1), memory


def make_inputs(length, fastest):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(2, length, HEADS, *shape, generator=generator, dtype=torch.float64)

    query, key, value = normal(KEY_DIM), normal(KEY_DIM), normal(VALUE_DIM)
    log_decay = -fastest * torch.rand(2, length, HEADS, generator=generator, dtype=torch.float64)
    return [query, key / key.norm(dim=-1, keepdim=True), value, log_decay, normal().sigmoid()]


@pytest.fixture(params=[None, 2])
def span(request, monkeypatch):
    """Also process chunks in nested groups, as on a GPU."""
    if request.param is not None:
        monkeypatch.setattr(delta_net, "_span", lambda count, device: min(request.param, count))


@pytest.mark.parametrize("fastest", [0.01, 15])
@pytest.mark.parametrize("length", [1, 5, CHUNK, 3 * CHUNK + 7, 6 * CHUNK])
def test_outputs_memory_and_gradients(length, fastest, span):
    exact = [tensor.requires_grad_() for tensor in make_inputs(length, fastest)]
    ours = [tensor.detach().float().requires_grad_() for tensor in exact]
    begins = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.03
    documents, start = begins.cumsum(dim=1), torch.randn(2, HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    expected = token_by_token(*exact, documents, start)
    actual = gated_delta_rule(*ours, documents, start.float())
    assert_close(actual, tuple(tensor.float() for tensor in expected), atol=1e-5, rtol=1e-5)
    for results in (expected, actual):
        sum(result.square().sum() for result in results).backward()
    for name, left, right in zip(NAMES, exact, ours, strict=True):
        # Also with fast decay, where cancellation leaves only a small gradient.
        assert (right.grad - left.grad).norm() <= 1e-5 * left.grad.norm(), name


def test_documents_do_not_see_each_other(span):
    inputs = [tensor.float().requires_grad_() for tensor in make_inputs(100, 1)]
    documents = (torch.arange(100) >= 70).long().expand(2, 100)
    output, _ = gated_delta_rule(*inputs, documents)
    output[:, 70:].sum().backward()
    assert all(not tensor.grad[:, :70].any() for tensor in inputs)
    alone, _ = gated_delta_rule(*(tensor[:, 70:] for tensor in inputs), documents[:, 70:])
    assert_close(output[:, 70:], alone, atol=1e-6, rtol=1e-6)


def test_memories_at_the_ends_of_documents(span):
    inputs = [tensor[:1].float() for tensor in make_inputs(3 * CHUNK + 7, 1)]
    ends = torch.tensor([0, 4, CHUNK - 1, CHUNK, 2 * CHUNK + 9, 3 * CHUNK + 6])
    documents = torch.searchsorted(ends, torch.arange(3 * CHUNK + 7))[None]
    output, memories = gated_delta_rule(*inputs, documents, ends=ends)
    assert_close(output, gated_delta_rule(*inputs, documents)[0])
    starts = [0, *(ends[:-1] + 1).tolist()]
    for start, end, memory in zip(starts, ends.tolist(), memories, strict=True):
        document = [tensor[:, start : end + 1] for tensor in inputs]
        _, alone = gated_delta_rule(*document, torch.zeros(1, end + 1 - start, dtype=torch.long))
        assert_close(memory[None], alone, atol=1e-6, rtol=1e-6)


def test_heads_may_share_keys():
    query, key, value, log_decay, strength = (tensor.float() for tensor in make_inputs(100, 1))
    documents = torch.zeros(2, 100, dtype=torch.long)
    shared = query[:, :, :1], key[:, :, :1]
    repeated = (heads.expand(-1, -1, HEADS, -1) for heads in shared)
    actual = gated_delta_rule(*shared, value, log_decay, strength, documents)
    assert_close(actual, gated_delta_rule(*repeated, value, log_decay, strength, documents))


@pytest.mark.weekly
def test_compiled_rule_has_few_graphs_for_all_lengths():
    """The graph does not unroll the chunks and is not recompiled for each number of chunks."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(gated_delta_rule, fullgraph=True, backend=counter)
    for length in (300, 700, 513, 4096, 129, 1000, 2050, 5000, 640, 3333):
        inputs, documents = make_inputs(length, 1), torch.zeros(2, length, dtype=torch.long)
        results = []
        for rule in (gated_delta_rule, compiled):
            leaves = [tensor.float().requires_grad_() for tensor in inputs]
            output, memory = rule(*leaves, documents)
            gradients = torch.autograd.grad(output.square().sum() + memory.sum(), leaves)
            results.append((output, memory, *gradients))
        assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= 4 and counter.op_count <= 4 * 150


def test_rates_start_evenly_between_0_and_16():
    rates = DeltaNet.initializers["log_rate"](torch.empty(10_000), torch.Generator().manual_seed(0)).exp()
    assert 0.01 <= rates.min() < 0.1 and 15.9 < rates.max() <= 16
    assert rates.mean() == pytest.approx(8, abs=0.1)
