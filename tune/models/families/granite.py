"""Granite 3: Llama with four multipliers."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES
from tune.models.layers import PartConfig
from tune.models.rope import RopeConfig


def read_granite(file: ConfigFile, rope: RopeConfig | None, mlp: PartConfig) -> DecoderConfig:
    bias, scale = file.flag("attention_bias"), file.number("attention_multiplier", 1.0)
    attention = read.attention(file, rope, bias=bias, output_bias=bias, scale=scale)
    layer = LayerConfig(attention, mlp, residual_multiplier=file.number("residual_multiplier", 1.0))
    return read.decoder(
        file,
        [layer] * read.num_layers(file),
        read.rms_norm(file),
        embedding_multiplier=file.number("embedding_multiplier", 1.0),
        logit_scale=1 / file.number("logits_scaling", 1.0),
    )


def read_config(file: ConfigFile) -> DecoderConfig:
    return read_granite(file, read.rope(file), read.mlp(file, bias=file.flag("mlp_bias")))


FAMILY = Family(read_config, NAMES)
