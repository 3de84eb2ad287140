import platform

import pytest
import torch
from helpers import save_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from tune.checkpointers import load_model
from tune.distributed import PackedWeights, inference
from tune.distributed.inference import PackedWeight


def weights(model):
    return {name: type(weight) for name, weight in model.named_parameters()}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="weights are packed on x86")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config_class", ["LlamaConfig", "Qwen3Config"])
@pytest.mark.parametrize("load", [load_model, AutoModelForCausalLM.from_pretrained])
def test_products_with_packed_weights_match_torch(config_class, load, dtype, tmp_path):
    """Including a tied head and biases. Small weights stay unpacked, as does bf16 on a CPU without bf16 products."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "vocab_size": 1024, "num_hidden_layers": 2}
    tied = {"tie_word_embeddings": config_class == "Qwen3Config", "attention_bias": True}
    path = save_checkpoint(tmp_path / "model", config_class, **sizes, **tied)
    model = load(str(path)).to(dtype).eval()
    ids = torch.randint(1024, (2, 5))

    def logits():
        output = model(ids)
        return output if load is load_model else output.logits

    before = weights(model)
    with torch.no_grad():
        expected = logits()
    with inference(model):
        packed, within = logits(), weights(model)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 3e-2)
    assert weights(model) == before and {*before.values()} == {nn.Parameter}
    packed = {name.split(".")[-2] for name, kind in within.items() if kind is PackedWeight}
    mlp = {"gate", "up", "down"} if load is load_model else {"gate_proj", "up_proj", "down_proj"}
    has_products = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert mlp < packed and not any("norm" in name for name in packed) if has_products else not packed
    logits().sum().backward()  # training continues


def test_weights_are_restored_after_an_error():
    model = nn.Sequential(nn.Linear(512, 512), nn.Embedding(1000, 512))
    parameters = [*model.parameters()]
    packed = PackedWeights(model)
    for _ in range(2):
        with pytest.raises(RuntimeError), packed:
            model[0](torch.zeros(3, 511))
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
