"""OLMo 2: norms after the parts and not before, and all heads of queries and of keys normalised as one."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES as LLAMA_NAMES
from tune.models.layers import NormConfig
from tune.models.rope import RopeConfig

NAMES = LLAMA_NAMES | {
    "model.layers.{}.self_attn.q_norm": "blocks.{}.attention.query_norm",
    "model.layers.{}.self_attn.k_norm": "blocks.{}.attention.key_norm",
    "model.layers.{}.post_attention_layernorm": "blocks.{}.attention_output_norm",
    "model.layers.{}.post_feedforward_layernorm": "blocks.{}.mlp_output_norm",
}


def read_olmo2_layer(file: ConfigFile, rope: RopeConfig, norm: NormConfig) -> LayerConfig:
    bias = file.flag("attention_bias")
    attention = read.attention(file, rope, bias=bias, output_bias=bias, query_key_norm=norm, norm_all_heads=True)
    return LayerConfig(attention, read.mlp(file), norm_before=False, norm_after=True)


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(rms_norm_eps=1e-5)
    norm = read.rms_norm(file)
    layer = read_olmo2_layer(file, read.rope(file), norm)
    return read.decoder(file, [layer] * read.num_layers(file), norm)


FAMILY = Family(read_config, NAMES)
