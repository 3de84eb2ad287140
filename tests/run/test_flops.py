import pytest
import torch
from helpers import save_checkpoint
from torch import nn

from tune.devices import DEVICES
from tune.models import build
from tune.run import flops_per_token
from tune.run.flops import peak_flops


def test_peak_flops(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda")) == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX A1000")
    assert peak_flops(torch.device("cuda")) is None
    named = "NVIDIA GeForce RTX 4090", "NVIDIA L4", "NVIDIA L40S", "Tesla T4", "NVIDIA A10G"
    for name in (*named, "NVIDIA GeForce RTX 3060"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        key = name.split(" ", 1)[1].removeprefix("GeForce ").replace(" ", "").lower()
        assert peak_flops(torch.device("cuda")) == DEVICES[key].fastest * 1e12
    others = "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3060 Ti"
    for name in (*others, "NVIDIA RTX 4000 Ada", "NVIDIA A10"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    assert peak_flops(torch.device("cuda")) == DEVICES["mi300x"].tflops * 1e12  # the table that planning uses, too
    assert peak_flops(torch.device("cpu")) is None


def test_flops_per_token_of_a_tiny_model(checkpoint):
    with torch.device("meta"):
        model = build(str(checkpoint))
    weights = sum(parameter.numel() for parameter in model.parameters()) - model.embedding.weight.numel()
    assert flops_per_token(model, seq_len=10) == 6 * weights + 12 * 3 * 4 * 16 * 10  # 3 layers, 4 heads of 16


@pytest.mark.parametrize("seq_len", [5, 8, 100])
def test_attention_within_a_window(seq_len, tmp_path):
    folder = save_checkpoint(tmp_path, "MistralConfig", sliding_window=8, head_dim=16)
    with torch.device("meta"):
        model = build(str(folder))
    weights = sum(parameter.numel() for parameter in model.parameters()) - model.embedding.weight.numel()
    assert flops_per_token(model, seq_len) == 6 * weights + 12 * 3 * 4 * 16 * min(seq_len, 8)


@pytest.mark.parametrize("seq_len", [5, 8, 100])
def test_window_of_an_attention_of_transformers(seq_len):
    class Attention(nn.Module):
        sliding_window = 8

        def __init__(self):
            super().__init__()
            self.output = nn.Linear(32, 4, bias=False)

    assert flops_per_token(nn.Sequential(Attention()), seq_len) == 6 * 32 * 4 + 12 * 32 * min(seq_len, 8)
