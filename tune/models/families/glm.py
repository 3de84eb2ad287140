"""GLM-4: half of each head is rotated. Dense models rotate neighboring pairs, and fuse gate and up."""

from functools import partial

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.deepseek import CORRECTED_EXPERT_NAMES, IGNORED, read_layers
from tune.models.families.llama import NAMES as LLAMA_NAMES

GLM_NAMES = LLAMA_NAMES | {"model.layers.{}.mlp.gate_up_proj": "blocks.{}.mlp.gate_up"}
GLM4_NAMES = GLM_NAMES | {
    "model.layers.{}.post_self_attn_layernorm": "blocks.{}.attention_output_norm",
    "model.layers.{}.post_mlp_layernorm": "blocks.{}.mlp_output_norm",
}
GLM4_MOE_NAMES = LLAMA_NAMES | read.QUERY_KEY_NORM_NAMES | CORRECTED_EXPERT_NAMES


def read_glm(file: ConfigFile, norm_after: bool = False) -> DecoderConfig:
    """GLM-4; since 0414 with norms on both sides of attention and feed-forward."""
    file.set_defaults(
        head_dim=128, num_key_value_heads=2, attention_bias=True, max_position_embeddings=131072,
        rms_norm_eps=1.5625e-07, partial_rotary_factor=0.5,
    )  # fmt: skip
    rope = read.rope(file, partial=True, interleaved=True)
    attention = read.attention(file, rope, bias=file.flag("attention_bias"))
    return read.decoder(file, LayerConfig(attention, read.mlp(file, fused=True), norm_after=norm_after))


def read_glm4_moe(file: ConfigFile) -> DecoderConfig:
    """GLM-4.5, 4.6 and 4.7: experts as in DeepSeek-V3."""
    file.set_defaults(
        max_position_embeddings=131072, rms_norm_eps=1e-5, partial_rotary_factor=0.5, first_k_dense_replace=1,
    )  # fmt: skip
    attention = read.attention(
        file, read.rope(file, partial=True), bias=file.flag("attention_bias"),
        query_key_norm=read.rms_norm(file) if file.flag("use_qk_norm") else None,
    )  # fmt: skip
    return read.decoder(file, read_layers(file, attention))


register("glm", Family(read_glm, GLM_NAMES))
register("glm4", Family(partial(read_glm, norm_after=True), GLM4_NAMES))
register("glm4_moe", Family(read_glm4_moe, GLM4_MOE_NAMES, IGNORED))
