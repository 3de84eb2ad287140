"""Mixtral: Mistral with experts in every layer."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family
from tune.models.families.common import (
    read_attention,
    read_decoder,
    read_experts,
    read_head_dim,
    read_num_experts,
    read_rms_norm,
    read_router_loss,
    read_windows,
    with_windows,
)
from tune.models.families.llama import NAMES as LLAMA_NAMES

NAMES = LLAMA_NAMES | {
    "model.layers.{}.block_sparse_moe.gate": "blocks.{}.mlp.router",
    "model.layers.{}.block_sparse_moe.experts.{}.w1": "blocks.{}.mlp.experts.gate",
    "model.layers.{}.block_sparse_moe.experts.{}.w3": "blocks.{}.mlp.experts.up",
    "model.layers.{}.block_sparse_moe.experts.{}.w2": "blocks.{}.mlp.experts.down",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(max_position_embeddings=131072, rope_theta=1e6, rms_norm_eps=1e-5, num_experts_per_tok=2)
    file.expect(router_jitter_noise=0)
    experts = read_experts(file, read_num_experts(file, 8), "intermediate_size", router={"normalized": True})
    layer = LayerConfig(read_attention(file, file.rope(read_head_dim(file))), experts)
    layers = with_windows(layer, read_windows(file))
    return read_decoder(file, layers, read_rms_norm(file), router_loss=read_router_loss(file))


FAMILY = Family(read_config, NAMES)
