"""The arguments of `build` and `hf` that store the weights of blocks in 4 bits, or multiply in 8."""

import pytest
import torch
from helpers import save_checkpoint
from torch import nn
from torch.testing import assert_close

from tune import distributed, quantization
from tune.checkpointers import Pretrained, load_model
from tune.errors import TuneError
from tune.models import build, hf
from tune.quantization import NF4Weight
from tune.quantization.rounding import quantized_linears

TOKENS = torch.arange(32)[None]
BUILDERS = {"build": build, "hf": hf}


def loaded(builder, checkpoint, **how):
    with torch.device("meta"):
        model = BUILDERS[builder](str(checkpoint), **how)
    weights = Pretrained(str(checkpoint), model)
    model.requires_grad_(False)
    distributed.parallelize(model, distributed.init("cpu"), dtype="fp32")
    weights.load(model)
    return model.eval()


@pytest.fixture(params=BUILDERS)
def builder(request):
    if request.param == "hf":
        pytest.importorskip("transformers")
    return request.param


@pytest.mark.slow
@torch.no_grad()
def test_weights_of_blocks_in_4_bits(builder, checkpoint):
    """As with `quantize_linears`, which the argument calls."""
    outputs = {}
    for double in (True, False):
        model = loaded(builder, checkpoint, quantization="nf4", double_quantization=double)
        stored = [module for module in model.modules() if isinstance(module, NF4Weight)]
        assert len(stored) == 21  # seven in each block; not the head
        outputs[double] = model(TOKENS)
        theirs = load_model(str(checkpoint))
        for linear in quantized_linears(theirs).values():
            linear.weight.copy_(quantization.dequantize(*quantization.quantize(linear.weight, double), torch.float32))
        assert_close(outputs[double], theirs(TOKENS), atol=1e-4, rtol=1e-4)
    assert not torch.equal(outputs[True], outputs[False])
    assert_close(loaded(builder, checkpoint, quantization="nf4")(TOKENS), outputs[True], rtol=0, atol=0)


@torch.no_grad()
def test_products_in_8_bits(builder, checkpoint):
    pytest.importorskip("torchao.float8")
    distributed.init("cpu")
    model, theirs = loaded(builder, checkpoint, float8="rowwise"), load_model(str(checkpoint))
    exact = theirs(TOKENS)
    assert sum(type(module).__name__ == "Float8Linear" for module in model.modules()) == 21
    quantization.compute_in_float8(theirs, "rowwise", torch.device("cpu"))
    assert_close(model(TOKENS), theirs(TOKENS), atol=1e-4, rtol=1e-4)
    assert (model(TOKENS) - exact).abs().max() > 1e-4


def test_plain_by_default(builder, checkpoint):
    model = loaded(builder, checkpoint)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}


def test_odd_sizes_are_refused(builder, checkpoint, tmp_path):
    odd = save_checkpoint(tmp_path / "odd", intermediate_size=100)
    for how, message in (({"quantization": "nf4"}, "64"), ({"float8": "rowwise"}, "16")):
        with torch.device("meta"), pytest.raises(TuneError, match=message):
            BUILDERS[builder](str(odd), **how)
