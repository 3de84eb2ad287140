"""Seed-OSS: Llama with biases on queries, keys and values."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(attention_bias=True, max_position_embeddings=524288)
    file.ignore("pretraining_tp")
    file.without_dropout("residual_dropout")
    bias, output_bias = file.flag("attention_bias"), file.flag("attention_out_bias")
    attention = read.attention(file, read.rope(file), bias=bias, output_bias=output_bias)
    layer = LayerConfig(attention, read.mlp(file, bias=file.flag("mlp_bias")))
    return read.decoder(file, [layer] * read.num_layers(file), read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
