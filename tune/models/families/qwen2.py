"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; windows in later layers if asked for."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES


def read_late_windows(file: ConfigFile) -> list[int | None]:
    """A window in the layers from `max_window_layers` on, where `use_sliding_window` is on."""
    file.assume(sliding_window=4096)
    on, first = file.flag("use_sliding_window"), file.integer("max_window_layers", 28, minimum=0)
    windows = read.windows(file, lambda layer: layer >= first)
    return windows if on else [None] * len(windows)


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(max_position_embeddings=32768)
    layer = LayerConfig(read.attention(file, read.rope(file), bias=True), read.mlp(file))
    return read.decoder(file, read.with_windows(layer, read_late_windows(file)), read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
