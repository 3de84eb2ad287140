"""FlexAttention: its block masks and the results of its compiled graph; its kernels need a GPU."""

import functools
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import save_checkpoint, weekly_but
from models.test_attention import SCORINGS, make, parts, with_gradients
from torch.nn.attention import flex_attention
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.collators import Batch
from tune.distributed.activations import wrap_forward
from tune.losses import LinearCrossEntropy
from tune.models import attention, flex, layers
from tune.models.attention import attend, attend_masked
from tune.models.context import Masks
from tune.models.layers import AttentionConfig

CPU = torch.device("cpu")


@pytest.fixture
def on_cpu(monkeypatch):
    """Take the path of a GPU, with traced operators instead of kernels."""

    def choose(*arguments, softcap, sinks):
        return attention.Choice("flex" if softcap or sinks else "efficient")

    monkeypatch.setattr(attention, "choose", choose)
    monkeypatch.setattr(layers, "choose", choose)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it refuses gradients on a CPU
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(flex, "RUNS", {})
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(flex_attention.flex_attention, fullgraph=True, backend="aot_eager")


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("window", [None, 1, 100, 128, 200, 5000])
@pytest.mark.parametrize("lengths", [[[700]], [[1, 299], [300]], [[128, 256, 1, 255]], [[64] * 9, [576]]])
def test_block_mask_covers_exactly_the_visible_pairs(window, lengths):
    """Computed blocks contain all visible pairs, unmasked blocks only visible ones, and no block is empty."""
    ids = torch.tensor([[i for i, length in enumerate(row) for _ in range(length)] for row in lengths])
    batch = Batch.of(torch.zeros_like(ids), documents=ids)
    mask = flex.block_mask(batch.documents, window, batch.tokens.shape, CPU)
    document, order = batch.documents.ids.flatten(), torch.arange(ids.numel())
    distance = order[:, None] - order
    visible = (document[:, None] == document) & (distance >= 0) & (distance < (window or 10**6))
    assert torch.equal(mask.mask_mod(0, 0, order[:, None], order), visible)
    padded = torch.nn.functional.pad(visible, (0, -ids.numel() % 128) * 2)
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    computed, full = dense(mask.kv_num_blocks, mask.kv_indices), dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(computed | full, blocks.any(dim=(1, 3)))
    assert torch.equal(full, blocks.all(dim=(1, 3)) & ~computed)


def dense(numbers, indices):
    """The listed blocks as a mask `[blocks of queries, blocks of keys]`."""
    listed = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, number in enumerate(numbers[0, 0].tolist()):
        listed[row, indices[0, 0, row, :number].long()] = True
    return listed


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), RuntimeError("no kernel")])
def test_too_little_memory_is_not_a_kernel_that_is_missing(error, on_cpu, monkeypatch):
    _, documents = make()
    mask = flex.block_mask(documents, None, torch.Size([3, 32]), CPU)
    config = mock.Mock(num_heads=2, num_kv_heads=1, head_dim=16, sinks=False)
    monkeypatch.setattr(flex, "flex", mock.Mock(side_effect=error))
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            flex.runs(mask, config, torch.float32)
        assert not flex.RUNS
    else:
        with pytest.warns(UserWarning, match="no kernel"):
            assert not flex.runs(mask, config, torch.float32)
        assert [*flex.RUNS.values()] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softcap", "sinks", "all"])
def test_flex_matches_masked_attention(kind, on_cpu):
    heads, documents = make()
    scoring = SCORINGS[kind]
    mask = flex.block_mask(documents, scoring.window, torch.Size([3, 32]), CPU)
    expected = with_gradients(attend_masked, heads, documents, scoring)
    actual = with_gradients(lambda *arguments: attend(*arguments, mask), heads, documents, scoring)
    assert graphs() == 1
    assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_sinks_learn(on_cpu):
    heads, documents = make()
    sinks = torch.zeros(4, requires_grad=True)
    mask = flex.block_mask(documents, None, torch.Size([3, 32]), CPU)
    scoring = attention.Scoring(sinks=sinks)
    gradients = [
        torch.autograd.grad(output.square().sum(), sinks)[0]
        for output in (attend(*heads, documents, scoring, mask), attend_masked(*heads, documents, scoring))
    ]
    assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softcap", "all"])
def test_flex_with_shared_prefixes(kind, on_cpu):
    heads, documents = parts()
    scoring = SCORINGS[kind]
    mask = flex.block_mask(documents, scoring.window, heads[0].shape[:2], CPU)
    expected = attend(*heads, documents, scoring)
    assert graphs() == 0
    assert_close(attend(*heads, documents, scoring, mask), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_different_documents_share_one_graph(on_cpu):
    """From the second length on, all lengths share a graph; computing without gradients adds one more."""
    scoring = SCORINGS["softcap"]
    for step, length in enumerate([300, 300, 300, 400, 500, 600, 300]):
        ids = torch.arange(length)[None] // (50 + step)
        documents = Batch.of(torch.zeros_like(ids), documents=ids).documents
        heads = [torch.randn(1, length, number, 16, requires_grad=True) for number in (4, 2, 2)]
        mask = flex.block_mask(documents, None, ids.shape, CPU)
        attend(*heads, documents, scoring, mask).sum().backward()
    assert graphs() == 2
    with torch.compiler.set_stance("eager_on_recompile"), torch.no_grad():
        attend(*heads, documents, scoring, mask)
    assert graphs() == 3


def config(**changes):
    return AttentionConfig(
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope": None, "softcap": 2.0} | changes
    )


@pytest.mark.slow
def test_layers_share_masks(on_cpu):
    _, documents = make()
    masks = Masks(documents, torch.Size([3, 32]), CPU, torch.float32)
    layers = [config(), config(window=6), config(), config(window=6), config(softcap=None), SimpleNamespace()]
    full, sliding, *rest = (masks.of(layer) for layer in layers)
    assert full is not None and sliding is not None and full is not sliding
    assert rest == [full, sliding, None, None]


def test_device_without_flex_support_falls_back_with_one_warning(on_cpu, monkeypatch):
    """The fallback uses matrix products."""

    def refuse():
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(flex, "_compiled", refuse)
    heads, documents = make()
    with pytest.warns(UserWarning, match="shared memory"):
        mask = Masks(documents, torch.Size([3, 32]), CPU, torch.float32).of(config())
    assert mask is None
    with warnings.catch_warnings(action="error"):
        assert Masks(documents, torch.Size([3, 32]), CPU, torch.float32).of(config()) is None
    scoring = SCORINGS["softcap"]
    assert_close(
        attend(*heads, documents, scoring, mask), attend_masked(*heads, documents, scoring), atol=1e-5, rtol=1e-5
    )


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("checkpointing", "compile"),
    weekly_but([("selective", False)], [("none", False), ("selective", False), ("full", False), ("selective", True)]),
)
def test_model_with_softcapped_scores(checkpointing, compile, on_cpu, tmp_path, monkeypatch):
    """The two kinds of layers of Gemma 2 share one graph; with compiled blocks, each kind has its own."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = load_model(str(save_checkpoint(tmp_path, "Gemma2Config", head_dim=16, sliding_window=16)))
    batches = [Batch.of([[3] * 40], [[3] * 40], [[0] * n + [1] * (40 - n)]) for n in (10, 30)]

    def gradients(batch):
        return torch.autograd.grad(model(batch, LinearCrossEntropy()), list(model.parameters()))

    with monkeypatch.context() as plain:
        plain.setattr(flex, "runs", lambda *_: False)
        expected = [gradients(batch) for batch in batches]
    assert graphs() == 0
    for block in model.blocks:
        wrap_forward(block, checkpointing, compile, False)
    for batch, reference in zip(batches, expected, strict=True):
        assert_close(gradients(batch), reference, atol=1e-4, rtol=1e-4)
    assert graphs() == (3 if compile else 1)  # compiled blocks of two kinds, after the trial
