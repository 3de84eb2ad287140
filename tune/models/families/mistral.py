"""Mistral: Llama with a sliding window in all layers, or in none."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family
from tune.models.families.common import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_mlp,
    read_rms_norm,
    read_windows,
    with_windows,
)
from tune.models.families.llama import NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(sliding_window=4096, max_position_embeddings=131072)
    layer = LayerConfig(read_attention(file, file.rope(read_head_dim(file))), read_mlp(file))
    return read_decoder(file, with_windows(layer, read_windows(file)), read_rms_norm(file))


FAMILY = Family(read_config, NAMES)
