"""The delta rule by chunks is the one token by token that it is defined by."""

import importlib.util
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from tune.models import delta_kernels, delta_net
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
    """Also in groups of chunks, on several levels, as on a GPU."""
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
    found = gated_delta_rule(*ours, documents, start.float())
    assert_close(found, tuple(tensor.float() for tensor in expected), atol=1e-5, rtol=1e-5)
    for results in (expected, found):
        sum(result.square().sum() for result in results).backward()
    for name, left, right in zip(NAMES, exact, ours, strict=True):
        # Also where decay is fast, so that little of its gradient is left of large numbers.
        assert (right.grad - left.grad).norm() <= 1e-5 * left.grad.norm(), name


def test_a_document_sees_nothing_of_another(span):
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
    found = gated_delta_rule(*shared, value, log_decay, strength, documents)
    assert_close(found, gated_delta_rule(*repeated, value, log_decay, strength, documents))


@pytest.mark.slow
def test_compiled_for_all_lengths():
    """The graph neither has a chunk after another nor is made anew for each number of them."""
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


def test_what_the_kernels_are_given(monkeypatch):
    """One run of tokens with the bounds of its documents, in the type of the values, and decay in fp32."""
    given = {}

    def rule(*tensors, **options):
        given.update(tensors=tensors, **options)
        return tensors[2], "memories"

    modules = {"fla.ops.gated_delta_rule": types.SimpleNamespace(chunk_gated_delta_rule=rule)}
    monkeypatch.setattr(delta_kernels.importlib, "import_module", modules.__getitem__)
    inputs = [tensor.float() for tensor in make_inputs(10, 1)]
    inputs[2] = inputs[2].bfloat16()
    boundaries = torch.tensor([0, 10, 14, 20], dtype=torch.int32)
    output, memories = delta_kernels.gated_delta_rule(*inputs, boundaries, None, True)
    assert memories == "memories"
    assert_close(output, inputs[2])
    assert [tensor.dtype for tensor in given["tensors"]] == [torch.bfloat16] * 3 + [torch.float32] * 2
    assert all(tensor.shape[:2] == (1, 20) for tensor in given["tensors"])
    assert given["cu_seqlens"] is boundaries and given["output_final_state"] and given["scale"] == 1
    memory = torch.zeros(2, HEADS, KEY_DIM, VALUE_DIM)
    delta_kernels.gated_delta_rule(*inputs, None, memory, False)
    assert all(tensor.shape[:2] == (2, 10) for tensor in given["tensors"])
    assert given["initial_state"] is memory and given["cu_seqlens"] is None and not given["output_final_state"]


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and importlib.util.find_spec("fla")), reason="needs a CUDA device and fla-core"
)
@pytest.mark.parametrize("packed", [True, False])
def test_kernels_compute_our_rule(packed):
    draw = torch.Generator().manual_seed(0)
    query, key, value, log_decay, strength = (
        torch.randn(1, 300, *shape, generator=draw).cuda() for shape in ((2, 64), (2, 64), (4, 64), (4,), (4,))
    )
    query, key = (delta_net._unit(heads) for heads in (query, key))
    exact = [query, key, value.bfloat16(), -log_decay.exp(), strength.sigmoid()]
    if not delta_kernels.fits(key, exact[2]):
        pytest.skip("the kernels refuse this GPU")
    boundaries, ids, memory = None, torch.zeros(1, 300, dtype=torch.long, device="cuda"), None
    if packed:
        boundaries = torch.tensor([0, 5, 170, 300], dtype=torch.int32, device="cuda")
        ids = torch.searchsorted(boundaries[1:], torch.arange(300, device="cuda"), right=True)[None]
    else:
        memory = torch.randn(1, 4, 64, 64, generator=draw).cuda()
    results = []
    for is_ours in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in exact]
        if is_ours:
            output, last = gated_delta_rule(*leaves, ids, memory, boundaries[1:] - 1 if packed else None)
        else:
            output, last = delta_kernels.gated_delta_rule(*leaves, boundaries, memory, True)
        gradients = torch.autograd.grad(output.float().square().sum() + last.float().sum(), leaves)
        results.append([each.float() for each in (output, last, *gradients)])
    for ours, theirs in zip(*results, strict=True):
        assert (theirs - ours).norm() <= 2e-2 * ours.norm()


def test_rates_start_evenly_between_0_and_16():
    rates = DeltaNet.initializers["log_rate"](torch.empty(10_000), torch.Generator().manual_seed(0)).exp()
    assert 0.01 <= rates.min() < 0.1 and 15.9 < rates.max() <= 16
    assert rates.mean() == pytest.approx(8, abs=0.1)
