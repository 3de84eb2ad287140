"""The parts of a mixture of experts, against transformers' modules and plain loops."""

import pytest
import torch
from torch.testing import assert_close

from tune.models.grouped_product import grouped_product, product_by_group
from tune.models.moe import Dispatch, ExpertsConfig, combine, dispatch
from tune.models.routing import Router, RouterConfig, RoutingFigures, Supervision
from tune.models.attention import Segments

transformers = pytest.importorskip("transformers")


def loop(rows, weight, ends):
    starts = [0, *ends.tolist()]
    parts = [rows[start:end] @ each for start, end, each in zip(starts, ends.tolist(), weight, strict=False)]
    return torch.cat(parts)


@pytest.mark.parametrize("product", [grouped_product, product_by_group])
@pytest.mark.parametrize("counts", [[10, 0, 25, 15], [0, 0, 0, 50], [50, 0, 0, 0]])
@pytest.mark.parametrize("shape", [(20, 24), (17, 33)])  # that the kernel takes, and that it does not
@pytest.mark.parametrize("transposed", [True, False])
def test_grouped_product_is_a_product_for_each_group(product, counts, shape, transposed):
    torch.manual_seed(0)
    rows, weight = torch.randn(50, shape[0], requires_grad=True), torch.randn(4, *shape)
    weight = (weight.mT.contiguous().mT if transposed else weight).requires_grad_()
    ends = torch.tensor(counts).cumsum(0).int()
    expected = loop(rows, weight, ends)
    output = product(rows, weight, ends)
    assert_close(output, expected)
    gradient = torch.randn_like(expected)
    assert_close(
        torch.autograd.grad(output, (rows, weight), gradient), torch.autograd.grad(expected, (rows, weight), gradient)
    )


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (20, 24)), (torch.bfloat16, (16, 24))])
def test_grouped_product_compiles(dtype, shape):
    torch.compiler.reset()
    rows, weight = torch.randn(50, shape[0], dtype=dtype), torch.randn(4, *shape, dtype=dtype, requires_grad=True)
    compiled = torch.compile(grouped_product, fullgraph=True, backend="aot_eager")
    for counts in ([10, 0, 25, 15], [1, 2, 3, 44]):
        ends = torch.tensor(counts).cumsum(0).int()
        output, expected = compiled(rows, weight, ends), loop(rows, weight, ends)
        assert_close(output, expected)
        assert_close(torch.autograd.grad(output.sum(), weight)[0], torch.autograd.grad(expected.sum(), weight)[0])
