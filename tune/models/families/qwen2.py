"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; windows in later layers if asked for."""

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


def read_late_windows(file: ConfigFile) -> list[int | None]:
    """A window in the layers from `max_window_layers` on, where `use_sliding_window` is on."""
    file.assume(sliding_window=4096)
    on, first = file.flag("use_sliding_window"), file.get("max_window_layers", 28)
    windows = read_windows(file, lambda layer: layer >= first)
    return windows if on else [None] * len(windows)


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(max_position_embeddings=32768)
    layer = LayerConfig(read_attention(file, file.rope(read_head_dim(file)), bias=True), read_mlp(file))
    return read_decoder(file, with_windows(layer, read_late_windows(file)), read_rms_norm(file))


FAMILY = Family(read_config, NAMES)
