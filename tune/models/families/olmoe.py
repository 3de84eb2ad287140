"""OLMoE: experts in every layer, and all heads of queries and of keys normalised as one."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.qwen3 import NAMES as QWEN3_NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(
        max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts_per_tok=8,
        router_aux_loss_coef=0.01,
    )  # fmt: skip
    file.expect(clip_qkv=None)
    bias, norm = file.flag("attention_bias"), read.rms_norm(file)
    rope = read.rope(file)
    attention = read.attention(file, rope, bias=bias, output_bias=bias, query_key_norm=norm, norm_all_heads=True)
    experts = read.experts(
        file, read.num_experts(file, 64), "intermediate_size", router={"normalized": file.flag("norm_topk_prob")}
    )
    layers = [LayerConfig(attention, experts)] * read.num_layers(file)
    return read.decoder(file, layers, norm, router_loss=read.router_loss(file))


FAMILY = Family(read_config, QWEN3_NAMES | read.EXPERT_NAMES)
