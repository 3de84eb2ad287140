"""GLM-4 (before 0414): half of each head rotated in neighbouring pairs, gate and up as one projection."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES as LLAMA_NAMES

NAMES = LLAMA_NAMES | {"model.layers.{}.mlp.gate_up_proj": "blocks.{}.mlp.gate_up"}


def read_glm_layer(file: ConfigFile, norm_after: bool) -> LayerConfig:
    file.assume(
        head_dim=128, num_key_value_heads=2, attention_bias=True, max_position_embeddings=131072,
        rms_norm_eps=1.5625e-07, partial_rotary_factor=0.5,
    )  # fmt: skip
    rope = read.rope(file, partial=True, interleaved=True)
    attention = read.attention(file, rope, bias=file.flag("attention_bias"))
    return LayerConfig(attention, read.mlp(file, fused=True), norm_after=norm_after)


def read_config(file: ConfigFile) -> DecoderConfig:
    layer = read_glm_layer(file, norm_after=False)
    return read.decoder(file, [layer] * read.num_layers(file), read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
