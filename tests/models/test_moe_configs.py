"""config.json of models with experts: published files give the published sizes; invalid ones are refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tune import distributed
from tune.checkpointers import export, load_model
from tune.errors import TuneError
from tune.models import build
from tune.run import flops_per_token

transformers = pytest.importorskip("transformers")

COMMON = {
    "hidden_act": "silu", "initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False,
    "rope_scaling": None, "output_router_logits": False,
}  # fmt: skip
MIXTRAL = COMMON | {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "vocab_size": 32000,
}  # fmt: skip
QWEN2_MOE = COMMON | {
    "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
    "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_MOE = COMMON | {
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
OLMOE = COMMON | {
    "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024,
    "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "vocab_size": 50304,
}  # fmt: skip
GPT_OSS = COMMON | {
    "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
}  # fmt: skip
DEEPSEEK = COMMON | {
    "model_type": "deepseek_v3", "attention_bias": False, "auto_map": {"AutoConfig": "configuration_deepseek.X"},
    "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
# The number of parameters, and the active ones per token in billions.
PUBLISHED = {
    "Mixtral-8x7B": (MIXTRAL, 46_702_792_704, 12.9),
    "Qwen1.5-MoE-A2.7B": (QWEN2_MOE, 14_315_784_192, 2.7),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30_532_122_624, 3.3),
    "OLMoE-1B-7B": (OLMOE, 6_919_161_856, 1.3),
    "gpt-oss-20b": (GPT_OSS, 20_914_757_184, 3.6 + 0.58),  # published without the embedding
    "DeepSeek-V3": (DEEPSEEK, 671_026_404_352, 37),
}


def build_from(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields))
    with torch.device("meta"):
        return build(str(folder))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(tmp_path, name):
    fields, size, active = PUBLISHED[name]
    model = build_from(tmp_path, fields)
    assert sum(parameter.numel() for parameter in model.parameters()) == size
    activated = flops_per_token(model, seq_len=0) / 6 + model.embedding.weight.numel()
    assert activated == pytest.approx(active * 1e9, rel=0.02)
    assert model.config.router_loss == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok=9 cannot be chosen from 8 experts in 1 groups"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, r"router_jitter_noise=0\.1 is not supported"),
        (QWEN2_MOE | {"decoder_sparse_step": 0}, "field 'decoder_sparse_step' must be a positive integer; found 0"),
        (QWEN3_MOE | {"mlp_only_layers": 1}, "'mlp_only_layers' must be a list; found 1"),
        (QWEN3_MOE | {"num_local_experts": 7}, "num_local_experts=7 is not supported; supported: 128"),
        (
            QWEN3_MOE | {"output_router_logits": True, "router_aux_loss_coef": -1},
            "'router_aux_loss_coef' must be a pos",
        ),
        (OLMOE | {"clip_qkv": 8.0}, r"clip_qkv=8\.0 is not supported; supported: None"),
        (OLMOE | {"router_z_loss_coef": 0.1}, r"not supported for model_type 'olmoe': router_z_loss_coef=0\.1"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        (DEEPSEEK | {"n_group": 3}, "cannot be chosen from 256 experts in 3 groups of two or more"),
        (DEEPSEEK | {"topk_group": 9}, "in 8 groups of two or more, with topk_group=9"),
        (DEEPSEEK | {"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported; supported: 128"),
        (
            DEEPSEEK | {"first_k_dense_replace": "x"},
            "'first_k_dense_replace' must be an integer, at least 0; found 'x'",
        ),
        (
            DEEPSEEK | {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1}},
            "'yarn' with mscale_all_dim has no 'factor'",
        ),
    ],
)
def test_invalid_configs_are_refused(tmp_path, fields, message):
    with pytest.raises(TuneError, match=message):
        build_from(tmp_path, fields)


@pytest.mark.slow
def test_kimi_k2_is_read_as_deepseek_v3(tmp_path):
    """transformers has no such type; the published folder contains a copy of DeepSeek's code."""
    models = []
    for model_type in ("deepseek_v3", "kimi_k2"):
        (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | {"model_type": model_type}))
        with torch.device("meta"):
            models.append(build(str(tmp_path)))
    assert models[0].config == models[1].config and models[0].names == models[1].names


def test_multi_token_prediction_layers_stay_unchanged(tmp_path):
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16, "moe_intermediate_size": 16,
        "vocab_size": 64, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }  # fmt: skip
    source = tmp_path / "source"
    transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config(**small)).save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    extra = {f"model.layers.2.{name}": torch.randn(4, 4) for name in ("eh_proj.weight", "self_attn.q_a_proj.weight")}
    save_file(tensors | extra, source / "model.safetensors")
    model = load_model(str(source))
    export(model, SimpleNamespace(save=lambda _: None), tmp_path / "out", distributed.init("cpu"), source=str(source))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == tensors.keys() | extra.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in (tensors | extra).items())
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(1)}, source / "model.safetensors")
    with pytest.raises(TuneError, match=r"not known: model\.layers\.3\.eh_proj\.weight"):
        load_model(str(source))
