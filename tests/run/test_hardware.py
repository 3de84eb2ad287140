"""The facts that a run reports about its device, compared with the device and with the memory used."""

from types import SimpleNamespace

import pytest
import torch
from helpers import save_checkpoint

from tune.checkpointers import load_model
from tune.distributed import as_dtype
from tune.run import hardware
from tune.run.hardware import attention_notes, disk_note, score_bytes

SHAPE = (1, 64)


def test_small_disk_and_adapter_have_nonzero_figures(tmp_path, monkeypatch):
    """10,000 trained 4-byte parameters: three values each in two checkpoints and one being written, plus the export."""
    monkeypatch.setattr(hardware.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 1024))
    model = torch.nn.Linear(100, 100, bias=False)
    note = disk_note(tmp_path, model, torch.float32, keep=2)
    assert "100 KiB" in note and f"{10_000 * 4 * 10 / 1024:.4g} KiB" in note
    monkeypatch.setattr(hardware.shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000 * 4 * 10))
    assert disk_note(tmp_path, model, torch.float32, keep=2) == ""


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("Gemma2Config", {"head_dim": 16, "sliding_window": 512}),
        ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 512}),
        ("LlamaConfig", {}),
    ],
)
def test_memory_of_attention_scores_without_a_kernel(config, changes, dtype, tmp_path):
    """The reported memory equals the counted memory that autograd saves."""
    kind = as_dtype(dtype)
    model = load_model(str(save_checkpoint(tmp_path, config, **changes)), dtype=kind)
    kept = {}

    def pack(tensor):
        if tensor.is_floating_point() and tensor.shape[-2:-1] == (64,) and tensor.shape[-1] in (64, 65):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.arange(64)[None])
    counted = sum(tensor.nbytes for tensor in kept.values() if tensor.shape[:-2].numel() == 4)
    layers = [layer.attention for layer in model.config.layers]
    assert score_bytes(layers, kind, SHAPE, 64, False, "none") == pytest.approx(counted, rel=0.02)
    assert (counted > 0) == (config != "LlamaConfig")
    less = score_bytes(layers, kind, SHAPE, 64, False, "full")
    assert less * 3 == score_bytes(layers, kind, SHAPE, 64, False, "none")


@pytest.mark.parametrize(
    ("config", "capability", "dtype", "facts"),
    [
        ("LlamaConfig", (8, 0), "bf16", None),
        ("LlamaConfig", (8, 0), "fp32", ("3 of 3", "efficient", "compute.dtype=bf16")),
        ("LlamaConfig", (7, 5), "fp32", ("3 of 3", "efficient", "7.5")),
        ("Gemma2Config", (9, 0), "bf16", None),  # uses FlexAttention
        ("Gemma2Config", (7, 5), "fp32", ("3 of 3", "math", "7.5", "activation_checkpointing=full")),
        ("GptOssConfig", (9, 0), "bf16", None),
        ("GptOssConfig", None, "fp32", ("3 of 3", "math", "GiB")),  # on MPS
    ],
)
def test_slow_attention_is_reported(config, capability, dtype, facts, tmp_path, monkeypatch):
    changes = {} if config == "LlamaConfig" else {"head_dim": 16, "sliding_window": 512}
    model = load_model(str(save_checkpoint(tmp_path, config, **changes)))
    monkeypatch.setattr(hardware, "capability", lambda device: capability)
    notes = attention_notes(model, torch.device("cuda"), as_dtype(dtype), SHAPE, 64, False, "none")
    assert len(notes) == (facts is not None)
    assert all(fact in notes[0] for fact in facts or ())
    assert not attention_notes(model, torch.device("cpu"), as_dtype(dtype), SHAPE, 64, False, "none")
