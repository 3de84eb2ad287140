"""Qwen2 and Qwen3, dense and with experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES
from tune.models.layers import AttentionConfig

QWEN2_MOE_NAMES = NAMES | read.EXPERT_NAMES | {
    "model.layers.{}.mlp.shared_expert.gate_proj": "blocks.{}.mlp.shared.gate",
    "model.layers.{}.mlp.shared_expert.up_proj": "blocks.{}.mlp.shared.up",
    "model.layers.{}.mlp.shared_expert.down_proj": "blocks.{}.mlp.shared.down",
    "model.layers.{}.mlp.shared_expert_gate": "blocks.{}.mlp.shared_gate",
}  # fmt: skip
QWEN3_NAMES = NAMES | read.QUERY_KEY_NORM_NAMES
QWEN3_MOE_NAMES = QWEN3_NAMES | read.EXPERT_NAMES


def read_qwen2(file: ConfigFile) -> DecoderConfig:
    """Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; windows in later layers if asked for."""
    file.set_defaults(max_position_embeddings=32768)
    return read.decoder(file, _dense_layers(file, read.attention(file, read.rope(file), bias=True)))


def read_qwen3(file: ConfigFile) -> DecoderConfig:
    """Llama with normalized queries and keys, and an explicit head size."""
    file.set_defaults(head_dim=128, max_position_embeddings=32768)
    return read.decoder(file, _dense_layers(file, _qwen3_attention(file)))


def read_qwen2_moe(file: ConfigFile) -> DecoderConfig:
    """Qwen1.5-MoE and Qwen2 (57B-A14B): Qwen2 with experts in some or all layers, and a gated shared expert."""
    file.set_defaults(
        max_position_embeddings=32768, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    )  # fmt: skip
    attention = read.attention(file, read.rope(file), bias=file.flag("qkv_bias", True))
    first_full = file.integer("max_window_layers", 28, minimum=0)
    layers = _layers(file, attention, slides=lambda layer: layer % 2 == 0 and layer < first_full)
    shared = file.integer("shared_expert_intermediate_size")
    return _decoder_with_experts(file, layers, num_experts=60, shared=shared, shared_gate=True)


def read_qwen3_moe(file: ConfigFile) -> DecoderConfig:
    """Qwen3 with experts (30B-A3B, 235B-A22B), in some or all layers."""
    file.set_defaults(
        max_position_embeddings=32768, num_key_value_heads=4, num_experts_per_tok=8, moe_intermediate_size=768,
    )  # fmt: skip
    file.ignore("max_window_layers")
    layers = _layers(file, _qwen3_attention(file), slides=lambda layer: True)
    return _decoder_with_experts(file, layers, num_experts=128)


def _qwen3_attention(file: ConfigFile) -> AttentionConfig:
    return read.attention(file, read.rope(file), bias_field="attention_bias", query_key_norm=read.rms_norm(file))


def _layers(file: ConfigFile, attention: AttentionConfig, slides: Callable[[int], bool]) -> list[LayerConfig]:
    file.set_defaults(sliding_window=4096)
    windows = read.windows(file, slides, switch="use_sliding_window")
    return read.with_windows(LayerConfig(attention, read.mlp(file)), windows)


def _dense_layers(file: ConfigFile, attention: AttentionConfig) -> list[LayerConfig]:
    first_sliding = file.integer("max_window_layers", 28, minimum=0)
    return _layers(file, attention, slides=lambda layer: layer >= first_sliding)


def _decoder_with_experts(
    file: ConfigFile, layers: list[LayerConfig], num_experts: int, **special: Any
) -> DecoderConfig:
    """Every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    router = {"normalized": file.flag("norm_topk_prob")}
    experts = read.experts(file, read.num_experts(file, num_experts), router=router, **special)
    step, dense = file.integer("decoder_sparse_step", 1), file.entries("mlp_only_layers", [])
    layers = [
        layer if number in dense or (number + 1) % step else replace(layer, mlp=experts)
        for number, layer in enumerate(layers)
    ]
    return read.decoder(file, layers, router_loss=read.router_loss(file))


register("qwen2", Family(read_qwen2, NAMES))
register("qwen2_moe", Family(read_qwen2_moe, QWEN2_MOE_NAMES))
register("qwen3", Family(read_qwen3, QWEN3_NAMES))
register("qwen3_moe", Family(read_qwen3_moe, QWEN3_MOE_NAMES))
