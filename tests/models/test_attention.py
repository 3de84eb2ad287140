"""Every attention path matches the definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flash_on_cpu import flash_on_cpu
from torch.testing import assert_close

from tune.collators import Batch, Sample, collate
from tune.models import attention
from tune.models.attention import Scoring, attend, attend_cached, attend_masked
from tune.models.context import KeyValueCache

LENGTHS = [[7, 1, 24], [32], [5, 5, 5, 17]]  # documents of three rows of 32 tokens
SCORINGS = {
    "plain": Scoring(),
    "window": Scoring(window=6),
    "window of one": Scoring(window=1),
    "window wider than any document": Scoring(window=40),
    "scale": Scoring(scale=0.1, window=6),
    "softcap": Scoring(softcap=2.0),
    "sinks": Scoring(sinks=torch.linspace(-1, 2, 4)),
    "all": Scoring(window=6, scale=0.3, softcap=2.0, sinks=torch.linspace(-1, 2, 4)),
}


def make(device="cpu", dtype=torch.float32, head_dim=16, kv_heads=2, value_dim=None):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 32, 4, head_dim), (3, 32, kv_heads, head_dim), (3, 32, kv_heads, value_dim or head_dim)]
    heads = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    ids = [[i for i, length in enumerate(lengths) for _ in range(length)] for lengths in LENGTHS]
    batch = Batch.of(torch.zeros(3, 32, dtype=torch.long), documents=torch.tensor(ids))
    return heads, batch.to(torch.device(device)).documents


CPU, T4, A100, H100 = None, (7, 5), (8, 0), (9, 0)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes", "scoring", "expected"),
    [
        (CPU, FP32, (64, 64), {}, "efficient"),
        (CPU, BF16, (64, 64), {"sinks": True}, "math"),
        (T4, FP32, (64, 64), {}, "efficient"),
        (T4, BF16, (64, 64), {}, "math"),  # no kernel for bf16 on a T4
        (T4, FP32, (256, 256), {"softcap": True}, "math"),
        (A100, BF16, (64, 64), {}, "flash"),
        (H100, BF16, (64, 64), {"sinks": True}, "flash"),
        (H100, BF16, (192, 128), {}, "flash"),  # latent attention
        (H100, BF16, (128, 192), {}, "efficient"),
        (H100, BF16, (512, 512), {}, "efficient"),
        (H100, BF16, (60, 60), {}, "flash"),
        (H100, FP32, (128, 128), {}, "efficient"),
        (H100, torch.float64, (128, 128), {}, "math"),
        (H100, BF16, (256, 256), {"softcap": True}, "flex"),
        (H100, FP32, (64, 64), {"sinks": True}, "flex"),
        (H100, BF16, (512, 512), {"softcap": True}, "math"),
    ],
)
def test_choice_of_the_attention_path(capability, dtype, sizes, scoring, expected):
    path, because = attention.choose(capability, dtype, *sizes, **scoring)
    assert path == expected
    assert bool(because) == (path not in ("flash", "efficient") or (path == "efficient" and capability is not None))


@pytest.mark.parametrize("kind", [kind for kind in SCORINGS if kind not in ("softcap", "all")])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("value_dim", [8, 16])
def test_flash_matches_the_definition(kind, kv_heads, value_dim):
    """Sinks are exact too; latent attention has smaller value heads."""
    heads, documents = make(dtype=torch.float64, kv_heads=kv_heads, value_dim=value_dim)
    scoring = SCORINGS[kind]
    if scoring.sinks is not None:
        scoring = replace(scoring, sinks=scoring.sinks.double().requires_grad_())
        heads.append(scoring.sinks)

    def outcome(function):
        output = function(*heads[:3], documents, scoring)
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        return output, *torch.autograd.grad((output * weights).sum(), heads)

    # With sinks, attend_masked has a softmax in fp32.
    expected = outcome(attend_masked if scoring.sinks is None else by_definition)
    with flash_on_cpu():
        actual = outcome(attend)
    assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("path", ["flash", "efficient"])
@pytest.mark.parametrize("sizes", [(10, 10), (14, 7)])
def test_heads_of_any_size(path, sizes, monkeypatch):
    """Kernels refuse heads whose size is not a multiple of 16 bytes."""
    heads, documents = make(head_dim=sizes[0], value_dim=sizes[1])
    monkeypatch.setattr(attention, "capability", lambda _: H100)
    with flash_on_cpu(), monkeypatch.context() as patch:
        patch.setattr(attention, "choose", lambda *_, **__: attention.Choice(path))
        output = attend(*heads, documents)
    assert_close(output, attend_masked(*heads, documents), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "window", "sinks"])
def test_flash_with_one_document_per_row(kind):
    heads, _ = make()
    expected = attend(*heads, None, SCORINGS[kind])
    with flash_on_cpu():
        assert_close(attend(*heads, None, SCORINGS[kind]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "window", "sinks"])
def test_flash_with_shared_prefixes(kind):
    """Queries are the ends of documents whose first keys belong to other documents."""
    (query, key, value), documents = parts()
    expected = attend(query, key, value, documents, SCORINGS[kind])
    with flash_on_cpu():
        assert_close(attend(query, key, value, documents, SCORINGS[kind]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "window", "sinks"])
def test_flash_in_compiled_blocks(kind):
    """Blocks compile whole; from the second batch on, one graph serves all documents up to a length."""
    sinks = SCORINGS[kind].sinks
    scoring = SCORINGS[kind] if sinks is None else replace(SCORINGS[kind], sinks=sinks.clone().requires_grad_())
    heads, documents = make()
    lengths = [20, 12], [20, 6, 6]
    ids = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)).expand(3, 32) for row in lengths]
    batches = [documents, *(Batch.of(torch.zeros_like(row), documents=row).documents for row in ids)]
    expected = [with_gradients(attend_masked, heads, batch, scoring) for batch in batches]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with flash_on_cpu():
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        actual = [with_gradients(compiled, heads, batch, scoring) for batch in batches]
    assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_compiled_fp32_avoids_the_kernel_without_compilable_gradients(monkeypatch):
    """The kernel's shape function in torch lacks an argument, so inductor fails (2.11 to 2.13)."""
    heads, documents = make()
    expected = with_gradients(attend_masked, heads, documents, Scoring())
    torch.compiler.reset()
    monkeypatch.setattr(attention, "capability", lambda _: (9, 0))
    with pytest.raises(NotImplementedError):  # the kernel of GPUs
        attend(*heads, documents)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_close(with_gradients(compiled, heads, documents, Scoring()), expected, atol=1e-5, rtol=1e-5)


def parts():
    """A batch of three documents that share their first tokens."""
    tokens = [[*range(20), *(100 + i for i in range(n))] for n in (5, 1, 11)]
    rows = [Sample(np.array(row), np.r_[np.full(len(row) - 1, -100), 1]) for row in tokens]
    shared = collate(rows).shared
    heads = [torch.randn(1, shared.tokens.shape[1], number, 16) for number in (4, 2, 2)]
    return heads, shared.documents


def by_definition(query, key, value, documents, scoring):
    """Softmax over the visible tokens, one token and head at a time."""
    rows = []
    for b, t, h in torch.cartesian_prod(torch.arange(3), torch.arange(32), torch.arange(4)).tolist():
        kv_head = h * key.shape[2] // 4
        first = max(0, t - (scoring.window or 32) + 1)
        seen = [s for s in range(first, t + 1) if documents.ids[b, s] == documents.ids[b, t]]
        scores = key[b, seen, kv_head] @ query[b, t, h] * (scoring.scale or query.shape[-1] ** -0.5)
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks[h, None]])
        rows.append(scores.softmax(0)[: len(seen)] @ value[b, seen, kv_head])
    return torch.stack(rows).view(3, 32, 4, -1)


def with_gradients(function, heads, documents, scoring):
    output = function(*heads, documents, scoring)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output).to(output.dtype)
    return output, *torch.autograd.grad((output * weights).sum(), heads)


def test_bf16_on_a_cpu_has_the_gradients_of_fp32():
    """The bf16 backward kernel of CPUs takes four times as long and is less exact."""
    heads, documents = make(dtype=torch.bfloat16)
    exact = [head.detach().float().requires_grad_() for head in heads]
    actual, expected = (with_gradients(attend, tensors, documents, Scoring()) for tensors in (heads, exact))
    assert_close(actual[0], expected[0].bfloat16(), rtol=0, atol=0)
    weights = torch.linspace(-1, 1, actual[0].numel()).view_as(actual[0]).bfloat16().float()
    gradients = torch.autograd.grad((attend(*exact, documents) * weights).sum(), exact)
    assert_close(actual[1:], tuple(gradient.bfloat16() for gradient in gradients), rtol=0, atol=0)


def test_documents_know_their_lengths_and_boundaries():
    _, documents = make()
    assert documents.lengths == tuple(length for row in LENGTHS for length in row)
    assert documents.boundaries.tolist() == [0, 7, 8, 32, 64, 69, 74, 79, 96]
    assert documents.longest == 32


@pytest.mark.parametrize("kind", SCORINGS)
@pytest.mark.parametrize("value_dim", [16, 24])
def test_attend_and_attend_masked_match_the_definition(kind, value_dim):
    heads, documents = make(value_dim=value_dim)
    expected = with_gradients(by_definition, heads, documents, SCORINGS[kind])
    assert_close(with_gradients(attend, heads, documents, SCORINGS[kind]), expected, atol=1e-5, rtol=1e-5)
    assert_close(with_gradients(attend_masked, heads, documents, SCORINGS[kind]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", SCORINGS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_document_per_row_needs_no_documents(kind, kv_heads):
    heads, _ = make(kv_heads=kv_heads)
    documents = Batch.of(torch.zeros(3, 32, dtype=torch.long)).documents
    expected = attend_masked(*heads, documents, SCORINGS[kind])
    assert_close(attend(*heads, None, SCORINGS[kind]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", SCORINGS)
def test_decoding_token_by_token_with_a_cache(kind):
    (query, key, value), _ = make()
    scoring, lengths = SCORINGS[kind], [9, 4, 1]  # of the prompts
    heads = [
        torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])[None]
        for rows in (query, key, value)
    ]
    documents = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    cache = KeyValueCache([scoring.window or 40], rows=3, capacity=40)
    cache.start([2, 0, 1], Batch.of(torch.zeros(1, 14, dtype=torch.long), documents=documents), torch.device("cpu"))
    layer = cache.layers[0]
    layer.write(*heads[1:])
    order = [1, 2, 0]  # order[i] is the row of make() in row i of the cache
    expected = attend(query, key, value, None, scoring)
    for step in range(20):
        positions = [lengths[row] + step for row in order]
        cache.extend(torch.tensor(positions)[:, None], max(positions) + 1)
        query_now, *now = (heads[order, positions][:, None] for heads in (query, key, value))
        layer.write(*now)
        output = attend_cached(query_now, *layer.read(), layer.place.bias, scoring)
        assert_close(output[:, 0], expected[order, positions], atol=1e-5, rtol=1e-5)


def test_sinks_learn():
    heads, documents = make()
    sinks = torch.zeros(4, requires_grad=True)
    outputs = [
        attend(*heads, documents, Scoring(sinks=s)).sum(dim=(0, 1, 3)) for s in (sinks, sinks + 1e-2, sinks - 1e-2)
    ]
    (gradient,) = torch.autograd.grad(outputs[0].sum(), sinks)
    assert_close(gradient, (outputs[1] - outputs[2]) / 2e-2, atol=1e-3, rtol=1e-3)


def test_nothing_leaks_between_documents():
    (query, key, value), documents = make()
    output = attend(query, key, value, documents)
    (gradient,) = torch.autograd.grad(output[0, 8:].sum(), value)  # the third document of the first row
    assert (gradient[0, :8] == 0).all() and (gradient[1:] == 0).all() and (gradient[0, 8:] != 0).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a CUDA device")
@pytest.mark.parametrize("kind", ["plain", "window", "scale"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [60, 64])
def test_flash_kernel(kind, kv_heads, head_dim):
    heads, documents = make("cuda", torch.bfloat16, head_dim=head_dim, kv_heads=kv_heads)
    exact = [head.detach().float().requires_grad_() for head in heads]
    for ours, oracle in zip(
        with_gradients(attend, heads, documents, SCORINGS[kind]),
        with_gradients(attend_masked, exact, documents, SCORINGS[kind]),
        strict=True,
    ):
        assert (ours.float() - oracle).norm() <= 1e-2 * oracle.norm()
