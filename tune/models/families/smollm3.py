"""SmolLM3: Llama with layers that do not rotate."""

from dataclasses import replace

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
    read_windows,
)
from tune.models.families.llama import NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(rope_theta=2000000.0, max_position_embeddings=32768, num_key_value_heads=4, tie_word_embeddings=True)
    file.ignore("pretraining_tp", "max_window_layers")
    bias, every = file.flag("attention_bias"), file.integer("no_rope_layer_interval", 4)
    rope, mlp = file.rope(read_head_dim(file)), read_mlp(file, bias=file.flag("mlp_bias"))
    attention = read_attention(file, rope, bias=bias, output_bias=bias)
    rotate = file.get("no_rope_layers", [(index + 1) % every != 0 for index in range(read_num_layers(file))])
    windows = read_windows(file, lambda index: not rotate[index])
    if not file.flag("use_sliding_window"):
        windows = [None] * len(windows)
    layers = [
        LayerConfig(replace(attention, window=window, rope=rope if rotates else None), mlp)
        for window, rotates in zip(windows, rotate, strict=False)
    ]
    return read_decoder(file, layers, read_rms_norm(file))


FAMILY = Family(read_config, NAMES)
