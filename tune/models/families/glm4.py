"""GLM-4 (0414): norms on both sides, half of each head rotated in neighbouring pairs, gate and up as one."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family
from tune.models.families.common import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_mlp,
    read_num_layers,
    read_rms_norm,
)
from tune.models.families.llama import NAMES as LLAMA_NAMES

NAMES = LLAMA_NAMES | {
    "model.layers.{}.post_self_attn_layernorm": "blocks.{}.attention_output_norm",
    "model.layers.{}.mlp.gate_up_proj": "blocks.{}.mlp.gate_up",
    "model.layers.{}.post_mlp_layernorm": "blocks.{}.mlp_output_norm",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(
        head_dim=128, num_key_value_heads=2, attention_bias=True, max_position_embeddings=131072,
        rms_norm_eps=1.5625e-07, partial_rotary_factor=0.5,
    )  # fmt: skip
    rope = file.rope(read_head_dim(file), partial=True, interleaved=True)
    attention = read_attention(file, rope, bias=file.flag("attention_bias"))
    layer = LayerConfig(attention, read_mlp(file, fused=True), norm_after=True)
    return read_decoder(file, [layer] * read_num_layers(file), read_rms_norm(file))


FAMILY = Family(read_config, NAMES)
