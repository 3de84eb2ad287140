"""Quantization of a loaded model in your own training loop."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tune.errors import TuneError
from tune.peft import LoRA, add_adapters
from tune.quantization import NF4Weight, quantize_linears


class Encoder(nn.Module):
    """Not a language model: torch reads the weight of the attention output projection without calling it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 3)

    def forward(self, hidden):
        return self.head(self.layers(hidden).mean(dim=1))


@pytest.mark.parametrize("double", [False, True])
def test_weights_are_quantized_in_place(double):
    to_nf4 = pytest.importorskip("torchao.quantization").to_nf4
    model, reference = Encoder(), Encoder()
    hidden = torch.randn(4, 5, 64)
    before = model(hidden)
    assert quantize_linears(model, double=double) == 2 * 2 * 64 * 128
    for name, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), NF4Weight):
            plain = reference.get_submodule(name).weight.data
            theirs = to_nf4(plain, block_size=64, scaler_block_size=128)
            equal = module.weight.codes == theirs.quantized_data.view_as(module.weight.codes)
            assert equal.float().mean() > 0.999  # except where rounding decides
            where = equal.repeat_interleave(2, dim=1)
            assert_close(module.weight.full()[where], theirs.get_original_weight()[where], rtol=2e-2, atol=1e-3)
            reference.get_submodule(name).weight.data = module.weight.full()
    assert_close(model(hidden), reference(hidden))
    assert_close(model(hidden), before, rtol=0.1, atol=0.1)
    with torch.no_grad():  # torch has a fast path that reads the weights directly
        assert_close(model.eval()(hidden), reference.eval()(hidden))


def test_weights_on_the_meta_device_stay_there():
    with torch.device("meta"):
        model = Encoder()
    quantize_linears(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_quantizing_twice_or_after_adapters_is_refused():
    model = Encoder()
    quantize_linears(model)
    with pytest.raises(TuneError, match=r"layers\.layers\.0\.linear1 is a NF4Linear"):
        quantize_linears(model)
    model = Encoder()
    add_adapters(model, LoRA(rank=4, target_modules=["linear2"]))
    with pytest.raises(TuneError, match=r"layers\.layers\.0\.linear2 is a LoRALinear"):
        quantize_linears(model)
    assert type(model.layers.layers[0].linear1) is nn.Linear
    with pytest.raises(TuneError, match="no linear layers"):
        quantize_linears(nn.Linear(64, 64))


def test_training_on_quantized_weights_matches_their_values():
    model, reference = Encoder(), Encoder()
    quantize_linears(model)
    for name, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), NF4Weight):
            reference.get_submodule(name).weight.data = module.weight.full()
    hidden = torch.randn(4, 5, 64)
    for network in (model, reference):
        add_adapters(network, LoRA(rank=4, target_modules=["linear1", "linear2"]))
        optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.01)
        for _ in range(3):
            network(hidden).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model(hidden), reference(hidden))
