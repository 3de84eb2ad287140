"""Granite 3: Llama with four multipliers."""

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
from tune.models.families.llama import NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    bias = file.flag("attention_bias")
    attention = read_attention(
        file,
        file.rope(read_head_dim(file)),
        bias=bias,
        output_bias=bias,
        scale=file.number("attention_multiplier", 1.0),
    )
    mlp = read_mlp(file, bias=file.flag("mlp_bias"))
    layer = LayerConfig(attention, mlp, residual_multiplier=file.number("residual_multiplier", 1.0))
    return read_decoder(
        file,
        [layer] * read_num_layers(file),
        read_rms_norm(file),
        embedding_multiplier=file.number("embedding_multiplier", 1.0),
        logit_scale=1 / file.number("logits_scaling", 1.0),
    )


FAMILY = Family(read_config, NAMES)
