import torch

from tune.devices import DEVICES
from tune.models import build
from tune.run import flops_per_token
from tune.run.flops import peak_flops


def test_peak_flops(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda")) == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX A1000")
    assert peak_flops(torch.device("cuda")) is None
    for name in ("NVIDIA GeForce RTX 4090", "NVIDIA L4", "NVIDIA L40S", "Tesla T4", "NVIDIA A10G", "NVIDIA GeForce RTX 3060"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        key = name.split(" ", 1)[1].removeprefix("GeForce ").replace(" ", "").lower()
        assert peak_flops(torch.device("cuda")) == DEVICES[key].fastest * 1e12
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3060 Ti", "NVIDIA RTX 4000 Ada", "NVIDIA A10"):
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
