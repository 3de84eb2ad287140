"""Every field of config.json is understood or refused, never ignored."""

import json
from pathlib import Path

import pytest
import torch

from tune.errors import TuneError
from tune.models import build
from tune.models.config_file import ConfigFile
from tune.models.families import supported

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
LONGROPE = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
PHI3 = LLAMA | {
    "model_type": "phi3", "max_position_embeddings": 256, "original_max_position_embeddings": 64,
    "rope_scaling": LONGROPE,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 8}
DELTA = LLAMA | {"model_type": "qwen3_5_text", "head_dim": 8}


def build_from(tmp_path, fields):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with torch.device("meta"):
        return build(str(tmp_path))


# Fields that a file must have in addition to those of LLAMA, because they determine shapes.
SHAPES = {"head_dim": 16, "num_key_value_heads": 4}
CORRECTED = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
NEEDED = {
    "deepseek_v3": CORRECTED
    | {"kv_lora_rank": 16, "q_lora_rank": 8, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    "glm4_moe": CORRECTED | SHAPES,
    "granitemoehybrid": SHAPES
    | {"layer_types": ["full_attention"], "num_local_experts": 0, "position_embedding_type": "rope", "hidden_size": 64},
}


@pytest.mark.parametrize("model_type", sorted(set(supported()) - {"gemma3", "mistral3", "qwen3_5", "kimi_k2"}))
@pytest.mark.filterwarnings("ignore:.*is not applied")
def test_omitted_fields_have_the_defaults_of_transformers(model_type, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {name: LLAMA[name] for name in LLAMA if "size" in name or name.startswith("num")}
    short = {"model_type": model_type} | sizes | NEEDED.get(model_type, SHAPES)
    ours = build_from(tmp_path, short).config
    filled = transformers.AutoConfig.from_pretrained(tmp_path).to_json_string(use_diff=False)
    assert build_from(tmp_path, json.loads(filled)).config == ours


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LLAMA | {"model_type": "unheard"}, r"model_type 'unheard' is not native\. Native families: .* llama, "),
        ({"vocab_size": 3}, r"model_type '\(none\)' is not native"),
        (LLAMA | {"hidden_act": "tanh"}, "hidden_act='tanh' is not supported; supported: silu, "),
        (LLAMA | {"hidden_size": None}, "field 'hidden_size' is missing"),
        (LLAMA | {"vocab_size": "64"}, "field 'vocab_size' must be a positive integer; found '64'"),
        (LLAMA | {"num_experts": 8}, "not supported for model_type 'llama': num_experts=8"),
        (LLAMA | {"rope_scaling": {"rope_type": "ntk"}}, "rope type 'ntk' is not one of default"),
        (LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": [1] * 4}}, "'longrope' has no 'long_factor'"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope": 1}}, "unsupported field: mrope=1"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' has no 'factor'"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "field 'tie_word_embeddings' must be true or false; found 'yes'"),
        (LLAMA | {"rms_norm_eps": "small"}, "field 'rms_norm_eps' must be a positive number; found 'small'"),
        (LLAMA | {"rope_interleaved": True}, "not supported for model_type 'llama': rope_interleaved=True"),
        (QWEN3 | {"layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'; supported"),
        (QWEN3 | {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for num_hidden_layers=1"),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 0}, "'sliding_window' must be a positive integer"),
        (LLAMA | {"vocab_size": True}, "field 'vocab_size' must be a positive integer; found True"),
        (LLAMA | {"rope_scaling": "linear"}, "field 'rope_scaling' must be a mapping; found 'linear'"),
        (LLAMA | {"rope_parameters": {"rope_theta": "1e4"}}, "unsupported field: rope_theta='1e4'"),
        (LLAMA | {"head_dim": 7}, "7 dimensions of a head cannot be rotated in pairs"),
        (LLAMA | {"hidden_size": 30}, "hidden_size=30 is not a multiple of num_attention_heads=4"),
        (LLAMA | {"model_type": ["llama"]}, "is not native"),
        (LLAMA | {"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported"),
        (QWEN3 | {"layer_types": "full_attention"}, "field 'layer_types' must be a list; found 'full_attention'"),
        (QWEN3 | {"use_sliding_window": True, "max_window_layers": "8"}, "must be an integer, at least 0; found '8'"),
        (LLAMA | {"model_type": "smollm3", "no_rope_layers": []}, "no_rope_layers has 0 entries"),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 3}}, "short_factor must have 4 numbers; found 3"),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_factor": 1.0}}, "unsupported field: short_factor=1.0"),
        (LLAMA | {"model_type": "gemma2", "attn_logit_softcapping": 0}, "must be a positive number; found 0"),
        (
            LLAMA | {"model_type": "gemma3_text", "rope_parameters": {"factor": 2.0}},
            "rope_parameters: not supported: factor=2.0",
        ),
        (LLAMA | {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}}, "must be a mapping; found 3"),
        ({"model_type": "gemma3", "text_config": {"depth": 3}}, "config.json/text_config: not supported: depth=3"),
        ({"model_type": "gemma3", "text_config": [1]}, "field 'text_config' must be a mapping"),
        (DELTA | {"layer_types": ["mamba"]}, "layer_types has 'mamba'; supported: linear_attention, full_attention"),
        (
            DELTA | {"linear_num_value_heads": 24},
            "linear_num_value_heads=24 is not a multiple of linear_num_key_heads=16",
        ),
        (DELTA | {"attn_output_gate": False}, "attn_output_gate=False is not supported; supported: True"),
        (DELTA | {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported; supported: 'swish'"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_vl_text"}}, "supported: 'qwen3_5_text'"),
        (LLAMA | {"model_type": "granitemoehybrid", "layer_types": ["mamba"]}, "only attention is supported"),
        (
            LLAMA | {"model_type": "exaone4", "sliding_window_pattern": "GL"},
            "sliding_window_pattern='GL' is not supported",
        ),
        ([1], "must contain a mapping; found list"),
    ],
)
def test_invalid_configs_are_refused(tmp_path, fields, message):
    with pytest.raises(TuneError, match=message):
        build_from(tmp_path, fields)


def test_missing_folder_file_and_invalid_json_are_reported(tmp_path):
    with pytest.raises(TuneError, match="nowhere does not exist; it must be"):
        build(str(tmp_path / "nowhere"))
    with pytest.raises(TuneError, match=f"nowhere does not exist in {Path.cwd()}; it must be"):
        build("nowhere")
    with pytest.raises(TuneError, match=r"URLs are not supported: copy the folder to a disk of each node, and give"):
        build("s3://bucket/model")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(TuneError, match=r"has no config\.json; found notes\.txt"):
        build(str(tmp_path))
    with pytest.raises(TuneError, match="is a file"):
        build(str(tmp_path / "notes.txt"))
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(TuneError, match="is not valid JSON"):
        build(str(tmp_path))


def test_old_and_new_rope_fields_are_equivalent(tmp_path):
    scaling = {"type": "linear", "factor": 2.0}
    older = build_from(tmp_path, LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    newer = build_from(tmp_path, LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert older.config == newer.config
    rope = older.config.layers[0].attention.rope
    assert rope.theta == 5e5 and rope.kind == "linear"


def test_fields_without_effect_are_accepted(tmp_path):
    extra = {"_name_or_path": "x", "use_cache": True, "pretraining_tp": 2, "sliding_window": None, "is_decoder": False}
    assert build_from(tmp_path, LLAMA | extra).config == build_from(tmp_path, LLAMA).config


def test_ignored_dropout_of_the_original_training_is_reported(tmp_path):
    with pytest.warns(UserWarning, match=r"attention_dropout=0\.1 is ignored"):
        build_from(tmp_path, LLAMA | {"attention_dropout": 0.1})


def test_dynamic_rope_is_refused_beyond_the_trained_length(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = build_from(tmp_path, LLAMA | {"rope_scaling": scaling}).to_empty(device="cpu")
    model(torch.zeros(1, 64, dtype=torch.long))
    with pytest.raises(TuneError, match="a document has 65 tokens, more than the 64"):
        model(torch.zeros(1, 65, dtype=torch.long))


def test_longrope_limits_generation_to_the_length_a_cache_supports(tmp_path):
    """Longer documents have another rotation, including the tokens in the cache."""
    model = build_from(tmp_path, PHI3)
    assert (model.max_generated, model.max_positions) == (64, 256)


def test_null_differs_from_an_omitted_field(tmp_path):
    """Mistral 0.1 has a window and later files have null; in transformers, an omitted field means 4096."""
    mistral = LLAMA | {"model_type": "mistral"}
    windows = [
        build_from(tmp_path, fields).config.layers[0].attention.window
        for fields in (mistral, mistral | {"sliding_window": None}, mistral | {"sliding_window": 8})
    ]
    assert windows == [4096, None, 8]


# Published fields, except those that HARMLESS covers, with small sizes.
PUBLISHED = {
    "Phi-4-mini": PHI3
    | {
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0, "full_attn_mod": 1,
        "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "resid_pdrop": 0.0, "sliding_window": 262144,
        "partial_rotary_factor": 0.75, "attention_bias": False, "tie_word_embeddings": True,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [4.0] * 3},
    },
    "gemma-2": LLAMA
    | {
        "model_type": "gemma2", "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "head_dim": 8,
        "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 8, "sliding_window": 4096,
    },
    "gemma-3-1b": LLAMA
    | {
        "model_type": "gemma3_text", "attn_logit_softcapping": None, "cache_implementation": "hybrid", "head_dim": 8,
        "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma-3-4b": {
        "model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
        "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 64, "intermediate_size": 96, "model_type": "gemma3_text", "num_hidden_layers": 6,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
    "qwen-3.8-27b": {
        "model_type": "qwen3_5", "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053,
        "vision_end_token_id": 248054, "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_5_vision"},
        "text_config": {
            "model_type": "qwen3_5_text", "attn_output_gate": True, "bos_token_id": 248044, "eos_token_id": 248044,
            "full_attention_interval": 4, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "dtype": "bfloat16",
            "intermediate_size": 96, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 6, "linear_value_head_dim": 8, "max_position_embeddings": 262144,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mamba_ssm_dtype": "float32",
            "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 6, "num_hidden_layers": 4, "num_key_value_heads": 1, "output_gate_type": "swish",
            "rms_norm_eps": 1e-6, "use_cache": True, "vocab_size": 128,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 10000000,
                "partial_rotary_factor": 0.25, "rope_type": "default",
            },
        },
    },
    "command-r7b": LLAMA
    | {
        "model_type": "cohere2", "head_dim": 8, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
        "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True, "rms_norm_eps": None,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "use_qk_norm": False,
    },
    "starcoder2": LLAMA
    | {
        "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "norm_epsilon": 1e-5,
        "norm_type": "layer_norm", "sliding_window": 4096, "use_bias": True, "rms_norm_eps": None,
    },
    "SmolLM3": LLAMA
    | {
        "model_type": "smollm3", "max_window_layers": 28, "no_rope_layer_interval": 4, "no_rope_layers": [1],
        "layer_types": ["full_attention"], "pretraining_tp": 2, "sliding_window": None, "use_sliding_window": False,
    },
    "Olmo-3": LLAMA
    | {
        "model_type": "olmo3", "layer_types": ["full_attention"], "rope_theta": 500000, "sliding_window": 4096,
        "rope_scaling": {
            "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "rope_type": "yarn",
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_accepted(tmp_path, name):
    build_from(tmp_path, PUBLISHED[name])


def test_gemma3_scales_only_the_full_attention_layers(tmp_path):
    ropes = [layer.attention.rope for layer in build_from(tmp_path, PUBLISHED["gemma-3-4b"]).config.layers]
    assert [(rope.kind, rope.theta) for rope in ropes] == [("default", 1e4)] * 5 + [("linear", 1e6)]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("owner/name", r"hub: `tune download owner/name`$"),
        (
            "runs/mien",
            r"\*\.safetensors\. Did you mean 'runs/mine'\?$",
        ),  # its parent folder exists, so no hint about the hub
        ("runs/other", r"\*\.safetensors$"),
    ],
)
def test_missing_folder_gets_a_hint(name, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(TuneError, match=hint):
        ConfigFile(Path(name))
