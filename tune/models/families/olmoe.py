"""OLMoE: experts in every layer, and all heads of queries and of keys normalised as one."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family
from tune.models.families.common import (
    EXPERT_NAMES,
    read_attention,
    read_decoder,
    read_experts,
    read_head_dim,
    read_num_experts,
    read_num_layers,
    read_rms_norm,
    read_router_loss,
)
from tune.models.families.qwen3 import NAMES as QWEN3_NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(
        max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts_per_tok=8,
        router_aux_loss_coef=0.01,
    )  # fmt: skip
    file.expect(clip_qkv=None)
    bias, norm = file.flag("attention_bias"), read_rms_norm(file)
    rope = file.rope(read_head_dim(file))
    attention = read_attention(file, rope, bias=bias, output_bias=bias, query_key_norm=norm, norm_all_heads=True)
    experts = read_experts(
        file, read_num_experts(file, 64), "intermediate_size", router={"normalized": file.flag("norm_topk_prob")}
    )
    layers = [LayerConfig(attention, experts)] * read_num_layers(file)
    return read_decoder(file, layers, norm, router_loss=read_router_loss(file))


FAMILY = Family(read_config, QWEN3_NAMES | EXPERT_NAMES)
