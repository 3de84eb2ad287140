"""Arcee AFM: Llama with a feed-forward of squared ReLU without a gate."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-5)
    bias = file.flag("attention_bias")
    attention = read.attention(file, read.rope(file), bias=bias, output_bias=bias)
    layer = LayerConfig(attention, read.mlp(file, gated=False, bias=file.flag("mlp_bias")))
    return read.decoder(file, [layer] * read.num_layers(file), read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
