"""Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, TinyLlama and kin."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read

NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers.{}.input_layernorm": "blocks.{}.attention_norm",
    "model.layers.{}.self_attn.q_proj": "blocks.{}.attention.query",
    "model.layers.{}.self_attn.k_proj": "blocks.{}.attention.key",
    "model.layers.{}.self_attn.v_proj": "blocks.{}.attention.value",
    "model.layers.{}.self_attn.o_proj": "blocks.{}.attention.output",
    "model.layers.{}.post_attention_layernorm": "blocks.{}.mlp_norm",
    "model.layers.{}.mlp.gate_proj": "blocks.{}.mlp.gate",
    "model.layers.{}.mlp.up_proj": "blocks.{}.mlp.up",
    "model.layers.{}.mlp.down_proj": "blocks.{}.mlp.down",
    "model.norm": "norm",
    "lm_head": "head",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.ignore("pretraining_tp")  # how the original training was split; the mathematics is the same
    bias = file.flag("attention_bias")
    attention = read.attention(file, read.rope(file), bias=bias, output_bias=bias)
    layer = LayerConfig(attention, read.mlp(file, bias=file.flag("mlp_bias")))
    return read.decoder(file, [layer] * read.num_layers(file), read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
