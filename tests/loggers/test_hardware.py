"""What a run says of its device, held to the device's facts and to the memory that is used."""

import pytest
import torch
from helpers import save_checkpoint
from omegaconf import OmegaConf

from tune.checkpointers import load_model
from tune.loggers.hardware import hardware_notes, score_bytes

CFG = OmegaConf.create(
    {"dtype": "bf16", "max_seq_len": 64, "packed": False, "compile": False, "micro_batch_size": 1}
    | {"memory": {"activation_checkpointing": "none"}}
)


@pytest.mark.parametrize(("capability", "told"), [((7, 5), True), ((8, 0), False)])
def test_bf16_on_an_older_gpu(checkpoint, capability, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    notes = list(hardware_notes(load_model(str(checkpoint)), torch.device("cuda"), CFG, longest=64))
    assert bool(notes) == told == any("compute capability 7.5" in note for note in notes)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("Gemma2Config", {"head_dim": 16, "sliding_window": 512}),
        ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 512}),
        ("LlamaConfig", {}),
    ],
)
def test_scores_without_a_kernel(config, changes, dtype, tmp_path):
    """What autograd keeps of them, counted, is what is said of them."""
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    model = load_model(str(save_checkpoint(tmp_path, config, **changes)), dtype=kind)
    kept = {}

    def pack(tensor):
        if tensor.is_floating_point() and tensor.shape[-2:-1] == (64,) and tensor.shape[-1] in (64, 65):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.arange(64)[None])
    counted = sum(tensor.nbytes for tensor in kept.values() if tensor.shape[:-2].numel() == 4)
    cfg = OmegaConf.merge(CFG, {"dtype": dtype})
    assert score_bytes(model, cfg, longest=64) == pytest.approx(counted, rel=0.02)
    assert score_bytes(model, cfg, longest=0) == score_bytes(model, cfg, longest=64)
    notes = list(hardware_notes(model, torch.device("mps"), cfg, longest=64))
    assert len(notes) == (config != "LlamaConfig")
    less = OmegaConf.merge(cfg, {"memory": {"activation_checkpointing": "full"}})
    assert score_bytes(model, less, longest=64) * 3 == score_bytes(model, cfg, longest=64)
