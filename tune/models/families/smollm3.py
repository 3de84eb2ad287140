"""SmolLM3: Llama with layers that do not rotate."""

from dataclasses import replace

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(rope_theta=2000000.0, max_position_embeddings=32768, num_key_value_heads=4, tie_word_embeddings=True)
    file.ignore("pretraining_tp", "max_window_layers")
    bias, every = file.flag("attention_bias"), file.integer("no_rope_layer_interval", 4)
    rope, mlp = read.rope(file), read.mlp(file, bias=file.flag("mlp_bias"))
    attention = read.attention(file, rope, bias=bias, output_bias=bias)
    rotate = read.by_layer(file, "no_rope_layers", lambda index: (index + 1) % every != 0)
    windows = read.windows(file, lambda index: not rotate[index])
    if not file.flag("use_sliding_window"):
        windows = [None] * len(windows)
    layers = [
        LayerConfig(replace(attention, window=window, rope=rope if rotates else None), mlp)
        for window, rotates in zip(windows, rotate, strict=True)
    ]
    return read.decoder(file, layers, read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
