"""Qwen3.5 (dense): Qwen3 with gated attention in every fourth layer, and gated delta nets in the others."""

from tune.errors import TuneError
from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.delta_net import DeltaNetConfig
from tune.models.families import Family, read, register
from tune.models.families.qwen import QWEN3_NAMES
from tune.models.layers import AttentionPartConfig, NormConfig

TEXT_NAMES = QWEN3_NAMES | {
    "model.layers.{}.linear_attn.in_proj_qkv": "blocks.{}.attention.query_key_value",
    "model.layers.{}.linear_attn.conv1d.weight": "blocks.{}.attention.convolution",
    "model.layers.{}.linear_attn.in_proj_b": "blocks.{}.attention.strength",
    "model.layers.{}.linear_attn.in_proj_a": "blocks.{}.attention.step",
    "model.layers.{}.linear_attn.dt_bias": "blocks.{}.attention.step_bias",
    "model.layers.{}.linear_attn.A_log": "blocks.{}.attention.log_rate",
    "model.layers.{}.linear_attn.in_proj_z": "blocks.{}.attention.gate",
    "model.layers.{}.linear_attn.norm": "blocks.{}.attention.norm",
    "model.layers.{}.linear_attn.out_proj": "blocks.{}.attention.readout",
}
NAMES = {theirs.replace("model.", "model.language_model.", 1): ours for theirs, ours in TEXT_NAMES.items()}


def read_qwen3_5_text(file: ConfigFile) -> DecoderConfig:
    file.set_defaults(head_dim=256, max_position_embeddings=32768, partial_rotary_factor=0.25, rms_norm_eps=1e-6)
    file.expect(attn_output_gate=True, output_gate_type="swish", mamba_ssm_dtype="float32")
    file.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # multi-token prediction
    every, norm = file.integer("full_attention_interval", 4), NormConfig("rms_offset", file.number("rms_norm_eps"))
    # For text, the positions of all mrope sections are the same.
    fields = {name: each for name, each in file.mapping("rope_parameters").items() if not name.startswith("mrope_")}
    rope = read.rope(file, partial=True, fields=fields)
    attention = read.attention(file, rope, bias_field="attention_bias", query_key_norm=norm, gated=True)
    kinds: dict[str, AttentionPartConfig] = {"linear_attention": _delta_net(file), "full_attention": attention}
    types = read.by_layer(file, "layer_types", lambda layer: list(kinds)[(layer + 1) % every == 0], kinds)
    mlp = read.mlp(file)
    return read.decoder(file, [LayerConfig(kinds[name], mlp) for name in types], norm)


def read_qwen3_5(file: ConfigFile) -> DecoderConfig:
    """The released models, which also read images: the text model is trained, the rest is exported unchanged."""
    file.ignore("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    text = read.language_model(file, tied=False)
    text.expect(model_type="qwen3_5_text")
    return read_qwen3_5_text(text)


def _delta_net(file: ConfigFile) -> DeltaNetConfig:
    num_keys, num_values = file.integer("linear_num_key_heads", 16), file.integer("linear_num_value_heads", 32)
    if num_values % num_keys:
        raise TuneError(
            f"{file.path}: linear_num_value_heads={num_values} is not a multiple of linear_num_key_heads={num_keys}"
        )
    return DeltaNetConfig(
        num_keys, num_values, file.integer("linear_key_head_dim", 128), file.integer("linear_value_head_dim", 128),
        file.integer("linear_conv_kernel_dim", 4), read.rms_norm(file),
    )  # fmt: skip


register("qwen3_5_text", Family(read_qwen3_5_text, TEXT_NAMES, ignored=(r"^mtp\.",)))
register("qwen3_5", Family(read_qwen3_5, NAMES, ignored=(r"^model\.visual\.", r"^mtp\.")))
