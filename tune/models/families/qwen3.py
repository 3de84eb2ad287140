"""Qwen3 (dense): Llama with normalised queries and keys, a head size of its own, and windows if asked."""

from dataclasses import replace

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family
from tune.models.families.common import read_attention, read_decoder, read_head_dim, read_mlp, read_rms_norm
from tune.models.families.llama import NAMES as LLAMA_NAMES
from tune.models.families.qwen2 import read_late_windows

NAMES = LLAMA_NAMES | {
    "model.layers.{}.self_attn.q_norm": "blocks.{}.attention.query_norm",
    "model.layers.{}.self_attn.k_norm": "blocks.{}.attention.key_norm",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    head_dim, bias, norm = read_head_dim(file, 128), file.flag("attention_bias"), read_rms_norm(file)
    rope = file.rope(head_dim, positions=32768)
    attention = read_attention(file, rope, head_dim, bias=bias, output_bias=bias, query_key_norm=norm)
    mlp = read_mlp(file)
    layers = [LayerConfig(replace(attention, window=window), mlp) for window in read_late_windows(file)]
    return read_decoder(file, layers, norm)


FAMILY = Family(read_config, NAMES)
