"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in later layers if asked."""

from dataclasses import replace

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
)
from tune.models.families.llama import NAMES


def read_late_windows(file: ConfigFile) -> list[int | None]:
    """A window in the layers from `max_window_layers` on, where `use_sliding_window` is on."""
    on, first = file.flag("use_sliding_window"), file.get("max_window_layers", 28)
    windows = read_windows(file, lambda layer: layer >= first, default=4096)
    return windows if on else [None] * len(windows)


def read_config(file: ConfigFile) -> DecoderConfig:
    head_dim = read_head_dim(file)
    attention = read_attention(file, file.rope(head_dim, positions=32768), head_dim, bias=True)
    mlp = read_mlp(file)
    layers = [LayerConfig(replace(attention, window=window), mlp) for window in read_late_windows(file)]
    return read_decoder(file, layers, read_rms_norm(file))


FAMILY = Family(read_config, NAMES)
