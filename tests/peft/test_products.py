"""Adapted layers match their formulas, with no more passes over activations than plain layers."""

import zlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tune import fused
from tune.models.layers import project
from tune.peft import LoRA, LoRALinear, adapter_kernels, add_adapters
from tune.peft.dropout import add_masked_product, masked

ROWS, WIDTH, RANK = 48, 32, 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # the magnitude of DoRA is in fp32
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's kernels need a CUDA device")


class Three(nn.Module):
    """Three layers of different widths with one input; two have biases."""

    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict(
            {"query": nn.Linear(WIDTH, 40), "key": nn.Linear(WIDTH, 24), "value": nn.Linear(WIDTH, 24, bias=False)}
        )
        self.double()
        add_adapters(self, LoRA(rank=RANK, alpha=12, **{"target_modules": [*self.parts]} | settings))
        for layer in self.adapted:
            nn.init.normal_(layer.lora_b, std=0.3)
            layer.dropout_keys = torch.arange(ROWS, dtype=torch.int32).view(2, -1) * 977
            if layer.magnitude is not None:
                layer.magnitude.data *= 1.5
        self.train()

    @property
    def adapted(self):
        return [layer for layer in self.parts.values() if isinstance(layer, LoRALinear)]

    def expected(self, hidden):
        """Yield the outputs according to the formulas of the papers."""
        for layer in self.parts.values():
            if layer not in self.adapted:
                yield F.linear(hidden, layer.weight, layer.bias)
                continue
            change = layer.scaling * layer.lora_b @ layer.lora_a
            if layer.magnitude is not None:
                norm = (layer.weight + change).norm(dim=1).detach()
                product = hidden @ ((layer.magnitude / norm)[:, None] * (layer.weight + change)).T
                yield product if layer.bias is None else product + layer.bias
                continue
            dropped = hidden
            if layer.dropout:
                dropped = masked(hidden, layer.dropout, layer.dropout_keys, layer.dropout_features)
            yield F.linear(hidden, layer.weight, layer.bias) + dropped @ change.T


SETTINGS = {
    "all": {}, "two of three": {"target_modules": ["query", "value"]}, "the last": {"target_modules": ["value"]},
    "ranks": {"rank_pattern": {"key": 3}, "alpha_pattern": {"value": 5.0}}, "dropout": {"dropout": 0.3},
    "dropout of two": {"dropout": 0.3, "target_modules": ["key", "value"]}, "dora": {"dora": True},
    "dora of two": {"dora": True, "target_modules": ["query", "key"]},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("needs_input", [True, False])
def test_layers_with_one_input_match_their_formulas(settings, needs_input):
    model = Three(**SETTINGS[settings])
    hidden = torch.randn(2, ROWS // 2, WIDTH, dtype=torch.double, requires_grad=needs_input)
    trained = [tensor for tensor in (hidden, *model.parameters()) if tensor.requires_grad]

    def gradients(outputs):
        loss = sum((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum() for output in outputs)
        return torch.autograd.grad(loss, trained)

    expected = list(model.expected(hidden * 1))
    actual = project(hidden * 1, [*model.parts.values()])
    assert_close(actual, expected, **CLOSE)
    assert_close(gradients(actual), gradients(expected), **CLOSE)
    with torch.no_grad():
        assert_close(project(hidden, [*model.parts.values()]), expected, **CLOSE)


def test_gradient_summed_in_place_is_not_shared():
    """The input is also used before and after the layers, and a hook observes its gradient."""
    model = Three()
    source = torch.randn(2, ROWS // 2, WIDTH, dtype=torch.double, requires_grad=True)
    results = []
    for compute in (lambda hidden: project(hidden, [*model.parts.values()]), model.expected):
        hidden, seen = source * 2, []
        hidden.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))
        outputs = list(compute(hidden))
        loss = hidden.square().sum() + sum(output.square().sum() for output in outputs) + hidden.sum()
        results.append((*torch.autograd.grad(loss, source), *seen))
    assert_close(*results)


def operations(function):
    """Count by name the operations that read or write as much as an activation; views do neither."""
    with torch.profiler.profile(record_shapes=True) as profile:
        function()
    counts: dict[str, int] = {}

    def count(event):
        is_wide = any(shape and torch.Size(shape).numel() >= ROWS * 24 for shape in event.input_shapes)
        if event.name in PRODUCTS or (is_wide and event.name.startswith("aten::") and not event.cpu_children):
            counts[event.name] = counts.get(event.name, 0) + 1
        else:
            for child in event.cpu_children:
                count(child)

    for event in profile.events():
        if event.cpu_parent is None:
            count(event)
    return {name: number for name, number in counts.items() if name.removeprefix("aten::") not in VIEWS}


PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
VIEWS = (
    "view",
    "t",
    "transpose",
    "as_strided",
    "reshape",
    "detach",
    "split",
    "empty_strided",
    "_unsafe_view",
    "result_type",
)


def test_only_matrix_products_read_activations():
    """Forward: one product for all A, three for W, three for B. Backward: for the input, one for W and three added to
    it; two for each B; one for all A."""
    model = Three()
    hidden = torch.randn(2, ROWS // 2, WIDTH, dtype=torch.double, requires_grad=True)
    outputs, slopes = [], [torch.randn(2, ROWS // 2, width, dtype=torch.double) for width in (40, 24, 24)]
    forward = operations(lambda: outputs.extend(project(hidden, [*model.parts.values()])))
    backward = operations(lambda: torch.autograd.backward(outputs, slopes))
    assert forward.keys() | backward.keys() <= {*PRODUCTS}
    assert sum(forward.values()) == 1 + 3 + 3
    assert sum(backward.values()) == 1 + 3 + 3 * 2 + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_norms_match_fp64(dtype):
    """The norms are computed without a matrix of the weight's size in fp32."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Sequential(nn.Linear(256, 512)))
    add_adapters(layer, LoRA(rank=8, alpha=16, dora=True))
    layer = layer[0][0]
    layer.weight.data = layer.weight.data.to(dtype)
    nn.init.normal_(layer.lora_b, std=0.05)
    a, b = (factor.detach().to(dtype) for factor in layer.factors())
    matrix = layer.weight.double() + layer.scaling * b.double() @ a.double()
    assert_close(layer._norm(a, b).double(), matrix.norm(dim=1), rtol=2e-6, atol=0)
    if dtype == torch.float32:
        with torch.profiler.profile(profile_memory=True) as profile:
            layer._norm(a, b)
        assert max(event.cpu_memory_usage for event in profile.events()) < layer.weight.nbytes / 2


def test_mask_bits_match_python_integers():
    """The bits follow from the keys of tokens and the indices of features."""

    def mix(bits):
        bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
        bits = (bits ^ bits >> 15) * 0x846CA68B % 2**32
        return bits ^ bits >> 16

    layer = Three(dropout=0.3).parts["key"]
    seed = zlib.crc32(b"parts.key")
    keys, width = layer.dropout_keys.flatten(), 20
    for row, key in enumerate(keys.tolist()[:5]):
        kept = masked(torch.ones(1, WIDTH), 0.3, keys[row : row + 1], layer.dropout_features)[0] > 0
        bits = [mix(key % 2**32 ^ mix((mix(feature) + seed) % 2**32)) for feature in range(width)]
        signed = [value - 2**32 if value >= 2**31 else value for value in bits]
        assert kept[:width].tolist() == [value >= round(0.3 * 2**32) - 2**31 for value in signed]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "rank"), [(37, 200, 4), (1024, 512, 16), (5, 300, 70)])
def test_kernels_match_plain_operations(rows, width, rank, dtype, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    def bits(count):
        return torch.randint(-(2**31), 2**31, (count,), generator=generator, device="cuda", dtype=torch.int32)

    keys, features, input, total = bits(rows), bits(width), normal(rows, width), normal(rows, width)
    narrow, matrix, slopes = normal(rows, 2 * rank)[:, rank:], normal(rank, width), normal(rows, width)
    factors, left, right = normal(width).float(), normal(rows, rank).float(), normal(rows, rank).float()

    def results():
        sums = total.clone()
        add_masked_product(sums, narrow, matrix, 0.3, keys, features)
        return masked(input, 0.3, keys, features), sums

    by_kernels = results()
    scaled, sums = adapter_kernels.scaled_gradient(slopes, input, factors)
    assert_close(scaled, (slopes * factors).to(dtype))
    assert_close(sums, (slopes.float() * input.float()).sum(dim=0), rtol=1e-4, atol=1e-3)
    expected = input.float().square().sum(dim=1) + 0.7 * (left * right).sum(dim=1)
    assert_close(adapter_kernels.squared_norms(input, left, right, 0.7), expected)
    monkeypatch.setattr(fused, "fits", lambda *_: False)
    plain = results()
    assert torch.equal(by_kernels[0] == 0, plain[0] == 0)
    assert_close(by_kernels[0], plain[0])
    assert_close(by_kernels[1], plain[1], **({} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}))
