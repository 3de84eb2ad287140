"""Mistral: Llama with a sliding window in all layers, or in none."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(sliding_window=4096, max_position_embeddings=131072)
    layer = LayerConfig(read.attention(file, read.rope(file)), read.mlp(file))
    return read.decoder(file, read.with_windows(layer, read.windows(file)), read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
