"""NF4 matches the reference for any slice of a weight and any sharding of the model."""

import pytest
import torch
from torch import nn
from torch._inductor import metrics
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import Pretrained, load_model
from tune.cli import main
from tune.errors import TuneError
from tune.models import build
from tune.peft import LoRA, add_adapters
from tune.quantization import NF4Weight, count_parameters, dequantize, nf4, quantize, quantize_linears
from tune.quantization.nf4 import LEVELS


def make_weight(rows=96, columns=256):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02


def back(weight, double=False):
    return dequantize(*quantize(weight, double), torch.float32)


def test_each_weight_is_rounded_to_the_nearest_level():
    weight = make_weight()
    blocks = weight.unflatten(1, (-1, 64))
    scales = blocks.abs().amax(dim=2, keepdim=True)
    levels = torch.tensor(LEVELS)
    nearest = levels[(blocks[..., None] / scales[..., None] - levels).abs().argmin(dim=-1)] * scales
    assert torch.equal(back(weight), nearest.flatten(1))


def test_nf4_is_as_exact_as_torchao():
    to_nf4 = pytest.importorskip("torchao.quantization").to_nf4
    weight = make_weight(128, 256)
    theirs = to_nf4(weight, block_size=64, scaler_block_size=256)
    codes, _, _ = quantize(weight)
    assert (codes.flatten() == theirs.quantized_data).float().mean() > 0.999  # except where rounding decides
    reference = (theirs.get_original_weight() - weight).norm()
    assert (back(weight) - weight).norm() <= reference
    assert (back(weight, double=True) - weight).norm() <= reference


def test_slice_of_rows_is_quantized_like_the_whole():
    weight = make_weight()
    for double in (False, True):
        assert torch.equal(back(weight[10:30], double), back(weight, double)[10:30])


def test_table_is_copied_to_a_device_once(checkpoint):
    """All weights share one table on the device, instead of copying it in each forward."""
    with torch.device("meta"):
        model = build(str(checkpoint))
    quantize_linears(model)
    distributed.parallelize(model, distributed.init("cpu"), dtype="fp32")
    tables = {weight.pairs for weight in model.modules() if isinstance(weight, NF4Weight)}
    assert len(tables) == 1 and not tables.pop().is_meta
    assert not [name for name in model.state_dict() if "pairs" in name]


@pytest.mark.weekly
@pytest.mark.parametrize("double", [False, True])
def test_compiled_dequantization_is_one_kernel(double):
    """The kernel reads codes and scales and writes the weight, without intermediate tensors in memory."""
    parts = quantize(make_weight(), double)
    with torch._inductor.config.patch(force_disable_caches=True):
        metrics.reset()
        weight = torch.compile(nf4._values, dynamic=True)(*parts, nf4.PAIRS, torch.bfloat16)
    assert torch.equal(weight, back(make_weight(), double).bfloat16())
    assert metrics.generated_kernel_count == 1


def test_levels_are_dequantized_exactly():
    weight = torch.tensor([-1.0, 0.0, 1.0, 0.7229568362236023] * 16).repeat(3, 2) * 0.5
    assert_close(back(weight), weight)
    assert (back(torch.zeros(2, 64)) == 0).all()


def test_product_and_gradient():
    weight = NF4Weight(96, 256, double=True, device=torch.device("cpu"))
    weight.load(make_weight())
    input = torch.randn(5, 256, requires_grad=True)
    full = weight.dequantize(torch.float32)
    assert_close(weight.linear(input, None), input @ full.T)
    (gradient,) = torch.autograd.grad(weight.linear(input, None).sum(), input)
    assert_close(gradient, full.sum(dim=0).expand_as(input))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("cpu_offload", [False, True])  # without and with FSDP
def test_quantized_model_matches_dequantized_weights(checkpoint, double, cpu_offload):
    with torch.device("meta"):
        model = build(str(checkpoint))
    weights = Pretrained(str(checkpoint), model)
    quantize_linears(model, double=double)
    distributed.parallelize(model, distributed.init("cpu"), dtype="fp32", cpu_offload=cpu_offload)
    weights.load(model)
    plain = load_model(str(checkpoint))
    with torch.no_grad():
        for block in plain.blocks:
            for parameter in block.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(back(parameter, double))
    tokens = torch.arange(50)[None]
    assert_close(model(tokens), plain(tokens), atol=1e-5, rtol=1e-5)
    held = sum(p.nbytes for block in model.blocks for n, p in block.named_parameters() if "weight." in n)
    count = sum(p.numel() for block in plain.blocks for p in block.parameters() if p.ndim == 2)
    assert held / count <= 0.6 + (8 / 64 if double else 0)  # rows of 64 are short for one range per row


def test_columns_that_do_not_divide_into_blocks_are_refused():
    with pytest.raises(TuneError, match="48 columns, which is not a multiple of 64"):
        quantize_linears(nn.Sequential(nn.Sequential(nn.Linear(64, 4), nn.Linear(48, 4))))


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
def test_quantizing_keeps_the_parameter_count(checkpoint, chats, tmp_path, double, capsys):
    """They are counted like in transformers: neither the bytes of the codes nor the scales."""
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters()
    adapter = sum(4 * sum(shape) for shape in [(64, 64), (64, 32), (64, 32), (64, 64), *[(64, 128)] * 3]) * 3
    with torch.device("meta"):
        model = build(str(checkpoint))
    quantize_linears(model, double=double)
    assert count_parameters(model) == base
    adapted = add_adapters(model, LoRA(rank=4))
    assert (adapted.trainable, adapted.total) == (adapter, base + adapter)
    assert f"{adapter:,} of {base + adapter:,} " in adapted.table()
    if double:  # the log lines of a run
        settings = [
            f"model.path={checkpoint}",
            f"dataset.path={chats}",
            "max_steps=1",
            "max_seq_len=128",
            "adapter.rank=4",
        ]
        settings += ["model.quantization=nf4", f"output_dir={tmp_path / 'run'}", "device=cpu", "compute.dtype=fp32"]
        main(["run", "lora_finetune", *settings])
        log = (tmp_path / "run" / "log.txt").read_text()
        assert f"model: {base + adapter:,} parameters, {adapter:,} trainable" in log
        assert f"{adapter:,} of {base + adapter:,} " in log


def test_kept_weight_is_dequantized_once(monkeypatch):
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 8, bias=True)))
    quantize_linears(model)
    input = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = model(input)
    calls = []
    weight = model[0][0].weight
    monkeypatch.setattr(weight, "dequantize", lambda dtype: calls.append(dtype) or NF4Weight.dequantize(weight, dtype))
    weight.keeps = True
    assert torch.equal(model(input), expected) and torch.equal(model(input), expected) and calls == [torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel needs a CUDA device")
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_matches_cpu_to_the_last_bit(double, dtype):
    weight = torch.randn(300, 192, generator=torch.Generator().manual_seed(0)) * 0.02
    host = quantize(weight, double)
    device = [None if part is None else part.cuda() for part in host]
    assert torch.equal(dequantize(*device, dtype).cpu(), dequantize(*host, dtype))
    if not double:  # the row means may differ in the last bit
        assert all(
            torch.equal(one.cpu(), other)
            for one, other in zip(quantize(weight.cuda()), host, strict=True)
            if other is not None
        )
