"""Every kernel computes what SDPA with the full mask computes."""

import pytest
import torch
from torch.testing import assert_close

from tune.models.attention import Segments, attend, attend_masked

LENGTHS = [[7, 1, 24], [32], [5, 5, 5, 17]]  # documents of three rows of 32 tokens


def make(device="cpu", dtype=torch.float32, head_dim=16, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 32, heads, head_dim) for heads in (4, kv_heads, kv_heads)]
    heads = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    ids = [[i for i, length in enumerate(lengths) for _ in range(length)] for lengths in LENGTHS]
    return heads, Segments.of(torch.tensor(ids, device=device))


def with_gradients(function, heads, segments):
    output = function(*heads, segments)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output).to(output.dtype)
    return output, *torch.autograd.grad((output * weights).sum(), heads)


def test_segments():
    _, segments = make()
    assert segments.lengths == [length for row in LENGTHS for length in row]
    assert segments.boundaries.tolist() == [0, 7, 8, 32, 64, 69, 74, 79, 96]
    assert segments.longest == 32


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_document_by_document(kv_heads):
    heads, segments = make(kv_heads=kv_heads)
    for ours, oracle in zip(
        with_gradients(attend, heads, segments), with_gradients(attend_masked, heads, segments), strict=True
    ):
        assert_close(ours, oracle, atol=1e-5, rtol=1e-5)


def test_one_document_a_row_needs_no_segments():
    heads, _ = make()
    segments = Segments.of(torch.zeros(3, 32, dtype=torch.long))
    assert_close(attend(*heads, None), attend_masked(*heads, segments), atol=1e-5, rtol=1e-5)


def test_nothing_leaks_between_documents():
    (query, key, value), segments = make()
    output = attend(query, key, value, segments)
    (gradient,) = torch.autograd.grad(output[0, 8:].sum(), value)  # the third document of the first row
    assert (gradient[0, :8] == 0).all() and (gradient[1:] == 0).all() and (gradient[0, 8:] != 0).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_flash_kernel(kv_heads):
    heads, segments = make("cuda", torch.bfloat16, head_dim=64, kv_heads=kv_heads)
    exact = [head.detach().float().requires_grad_() for head in heads]
    for ours, oracle in zip(
        with_gradients(attend, heads, segments), with_gradients(attend_masked, exact, segments), strict=True
    ):
        assert (ours.float() - oracle).norm() <= 1e-2 * oracle.norm()
