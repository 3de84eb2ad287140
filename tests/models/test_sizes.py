"""Well-known models from their config.json values: published parameter counts and FLOPs."""

import json

import pytest
import torch
from helpers import save_checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tune.models import build, hf
from tune.peft import LoRA, add_adapters
from tune.quantization import quantize_linears
from tune.run import flops_per_token

FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"
)  # fmt: skip


def fields(model_type, *values, tied=False, **others):
    common = {"model_type": model_type, "tie_word_embeddings": tied, "max_position_embeddings": 8192}
    return common | dict(zip(FIELDS, values, strict=True)) | others


GEMMA2 = {
    "head_dim": 256, "tied": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
SIZES = {
    "Llama 3.2 1B": (fields("llama", 2048, 8192, 16, 32, 8, 128256, tied=True), 1_235_814_400),
    "Llama 3.2 3B": (fields("llama", 3072, 8192, 28, 24, 8, 128256, tied=True, head_dim=128), 3_212_749_824),
    "Llama 3.1 8B": (fields("llama", 4096, 14336, 32, 32, 8, 128256), 8_030_261_248),
    "Llama 3.1 70B": (fields("llama", 8192, 28672, 80, 64, 8, 128256), 70_553_706_496),
    "Llama 3.1 405B": (fields("llama", 16384, 53248, 126, 128, 8, 128256), 405_853_388_800),
    "Llama 2 7B": (fields("llama", 4096, 11008, 32, 32, 32, 32000), 6_738_415_616),
    "SmolLM2 135M": (fields("llama", 576, 1536, 30, 9, 3, 49152, tied=True), 134_515_008),
    "Mistral 7B v0.3": (fields("mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None), 7_248_023_552),
    "Qwen2.5 7B": (fields("qwen2", 3584, 18944, 28, 28, 4, 152064), 7_615_616_512),
    "Qwen2.5 72B": (fields("qwen2", 8192, 29568, 80, 64, 8, 152064), 72_706_203_648),
    "Qwen3 0.6B": (fields("qwen3", 1024, 3072, 28, 16, 8, 151936, tied=True, head_dim=128), 596_049_920),
    "Qwen3 1.7B": (fields("qwen3", 2048, 6144, 28, 16, 8, 151936, tied=True, head_dim=128), 1_720_574_976),
    "Qwen3 4B": (fields("qwen3", 2560, 9728, 36, 32, 8, 151936, tied=True, head_dim=128), 4_022_468_096),
    "Qwen3 8B": (fields("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128), 8_190_735_360),
    "Qwen3 14B": (fields("qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128), 14_768_307_200),
    "Qwen3 32B": (fields("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128), 32_762_123_264),
    "Gemma 2 2B": (fields("gemma2", 2304, 9216, 26, 8, 4, 256000, **GEMMA2), 2_614_341_888),
    "Gemma 2 9B": (fields("gemma2", 3584, 14336, 42, 16, 8, 256000, **GEMMA2), 9_241_705_984),
    "Mixtral 8x7B": (
        fields("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704
    ),
    "Qwen3 30B-A3B": (
        fields("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
               moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
        30_532_122_624,
    ),
    "OLMoE 1B-7B": (
        fields("olmoe", 2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8), 6_919_161_856
    ),
    "gpt-oss 20B": (
        fields("gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
               sliding_window=128, attention_bias=True),
        20_914_757_184,
    ),
    "DeepSeek V3": (
        fields("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, moe_intermediate_size=2048, n_routed_experts=256,
               num_experts_per_tok=8, n_shared_experts=1, n_group=8, topk_group=4, first_k_dense_replace=3,
               q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
               routed_scaling_factor=2.5, norm_topk_prob=True),
        671_026_404_352,
    ),
    "Phi-4": (
        fields("phi3", 5120, 17920, 40, 40, 10, 100352, sliding_window=None, original_max_position_embeddings=8192),
        14_659_507_200,
    ),
}  # fmt: skip


@pytest.fixture
def on_meta(tmp_path):
    def make(config, builder=build):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with torch.device("meta"):
            return builder(str(tmp_path))

    return make


@pytest.mark.parametrize("name", SIZES)
def test_parameter_counts_match_published_ones(name, on_meta):
    config, published = SIZES[name]
    assert sum(parameter.numel() for parameter in on_meta(config).parameters()) == published


@pytest.mark.slow
def test_flops_match_the_llama_3_paper(on_meta):
    """3.8e25 FLOPs for 15.6T tokens: 6 per parameter and token."""
    config, _ = SIZES["Llama 3.1 405B"]
    assert flops_per_token(on_meta(config), seq_len=0) * 15.6e12 == pytest.approx(3.8e25, rel=0.01)


@pytest.mark.parametrize(
    ("name", "active"),  # as published, embeddings included, in billions
    [("Mixtral 8x7B", 12.9), ("Qwen3 30B-A3B", 3.3), ("OLMoE 1B-7B", 1.3), ("gpt-oss 20B", 3.6), ("DeepSeek V3", 37)],
)
def test_only_active_experts_count(name, active, on_meta):
    config, _ = SIZES[name]
    embedding = config["vocab_size"] * config["hidden_size"] / 1e9
    counted = flops_per_token(on_meta(config), seq_len=0) / 6e9
    assert counted + (0 if name == "gpt-oss 20B" else embedding) == pytest.approx(active, rel=0.02)


def test_flops_formula(on_meta):
    """6 (N - embedding) + 12 L H d T; a window limits T."""
    config, published = SIZES["Llama 3.1 8B"]
    expected = 6 * (published - 128256 * 4096) + 12 * 32 * 32 * 128 * 8192
    assert flops_per_token(on_meta(config), 8192) == expected
    config, published = SIZES["Gemma 2 9B"]
    assert flops_per_token(on_meta(config), 8192) == 6 * published + 12 * 21 * 16 * 256 * (8192 + 4096)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_flops_match_the_torch_counter(tmp_path, tied):
    """Both count the matrix products; norms are counted by us but not by torch."""
    pytest.importorskip("transformers")
    folder = save_checkpoint(tmp_path, tie_word_embeddings=tied)
    length = 64
    for model in (build(str(folder)), hf(str(folder)).to_empty(device="cpu")):
        counter = FlopCounterMode(display=False)
        with counter, sdpa_kernel(SDPBackend.MATH):  # torch does not count the fused attention of CPUs
            model(torch.zeros(1, length, dtype=torch.int64)).sum().backward()
        norms = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
        assert flops_per_token(model, length) - 6 * norms == counter.get_total_flops() / length


@pytest.mark.slow
def test_flops_with_adapters_and_quantized_weights(on_meta):
    config, published = SIZES["Qwen3 0.6B"]
    full = flops_per_token(on_meta(config), 512)
    attention = full - 6 * published
    model = on_meta(config)
    adapted = add_adapters(model, LoRA(rank=8))
    frozen = adapted.total - adapted.trainable
    assert flops_per_token(model, 512) == 4 * frozen + 6 * adapted.trainable + attention
    quantized = on_meta(config)
    quantize_linears(quantized.requires_grad_(False), double=True)
    add_adapters(quantized, LoRA(rank=8))
    assert flops_per_token(quantized, 512) == flops_per_token(model, 512)
    assert quantized.costs(512) == model.costs(512)  # the costs that divide blocks among pipeline stages


def test_flops_with_heads_of_several_sizes(on_meta):
    config = pytest.importorskip("transformers").Gemma4TextConfig(
        head_dim=64, global_head_dim=128, layer_types=["sliding_attention"] * 2 + ["full_attention"], vocab_size=90,
        num_hidden_layers=3, sliding_window=100, num_attention_heads=4, num_key_value_heads=2, num_kv_shared_layers=0,
    )  # fmt: skip
    model = on_meta(config.to_dict(), hf)
    assert flops_per_token(model, 500) - flops_per_token(model, 0) == 12 * 4 * (2 * 64 * 100 + 128 * 500)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mixtral", "mamba"])
def test_flops_of_models_loaded_through_transformers(model_type, on_meta):
    transformers = pytest.importorskip("transformers")
    config = {
        "mixtral": fields(model_type, 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        "mamba": transformers.MambaConfig().to_dict(),
    }[model_type]
    model = on_meta(config, hf)
    count = sum(parameter.numel() for parameter in model.parameters())
    if model_type == "mixtral":
        assert count == 46_702_792_704
        active = 12_879_925_248  # as published: 12.9B
        attention = 12 * 32 * 32 * 128 * 4096
        assert flops_per_token(model, 4096) == 6 * (active - 32000 * 4096) + attention
    else:
        assert flops_per_token(model, 4096) == 6 * count
