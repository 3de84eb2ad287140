"""Mixtral: Mistral with experts in every layer."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
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
    experts = read.experts(file, read.num_experts(file, 8), "intermediate_size", router={"normalized": True})
    layer = LayerConfig(read.attention(file, read.rope(file)), experts)
    layers = read.with_windows(layer, read.windows(file))
    return read.decoder(file, layers, read.rms_norm(file), router_loss=read.router_loss(file))


FAMILY = Family(read_config, NAMES)
