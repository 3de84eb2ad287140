import torch

from tune.loggers import flops_per_token
from tune.loggers.flops import peak_flops
from tune.models import build


def test_peaks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda")) == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    assert peak_flops(torch.device("cuda")) is None
    assert peak_flops(torch.device("cpu")) is None


def test_a_token_of_a_tiny_model(checkpoint):
    with torch.device("meta"):
        model = build(str(checkpoint))
    weights = sum(parameter.numel() for parameter in model.parameters()) - model.embedding.weight.numel()
    assert flops_per_token(model, seq_len=10) == 6 * weights + 12 * 3 * 4 * 16 * 10  # 3 layers, 4 heads of 16
