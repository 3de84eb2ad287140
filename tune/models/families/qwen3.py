"""Qwen3 (dense): Llama with normalised queries and keys, and a head size of its own."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES as LLAMA_NAMES
from tune.models.families.qwen2 import read_late_windows

NAMES = LLAMA_NAMES | {
    "model.layers.{}.self_attn.q_norm": "blocks.{}.attention.query_norm",
    "model.layers.{}.self_attn.k_norm": "blocks.{}.attention.key_norm",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(head_dim=128, max_position_embeddings=32768)
    bias, norm = file.flag("attention_bias"), read.rms_norm(file)
    rope = read.rope(file)
    attention = read.attention(file, rope, bias=bias, output_bias=bias, query_key_norm=norm)
    return read.decoder(file, read.with_windows(LayerConfig(attention, read.mlp(file)), read_late_windows(file)), norm)


FAMILY = Family(read_config, NAMES)
