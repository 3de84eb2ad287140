"""Qwen3 with experts (30B-A3B, 235B-A22B), in some or all layers."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.qwen2_moe import read_windows_if_used, with_experts
from tune.models.families.qwen3 import NAMES as QWEN3_NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(
        max_position_embeddings=32768, sliding_window=4096, num_key_value_heads=4,
        num_experts_per_tok=8, moe_intermediate_size=768,
    )  # fmt: skip
    bias, norm = file.flag("attention_bias"), read.rms_norm(file)
    rope = read.rope(file)
    attention = read.attention(file, rope, bias=bias, output_bias=bias, query_key_norm=norm)
    layers = read.with_windows(
        LayerConfig(attention, read.mlp(file)), read_windows_if_used(file, slides=lambda number: True)
    )
    experts = read.experts(file, read.num_experts(file, 128), router={"normalized": file.flag("norm_topk_prob")})
    return read.decoder(file, with_experts(file, layers, experts), norm, router_loss=read.router_loss(file))


FAMILY = Family(read_config, QWEN3_NAMES | read.EXPERT_NAMES)
