"""MiniMax-M2, in bf16: experts chosen by corrected sigmoids, and all heads of queries and of keys normalised as one."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.mixtral import NAMES as MIXTRAL_NAMES
from tune.models.families.qwen3 import NAMES as QWEN3_NAMES

NAMES = QWEN3_NAMES | MIXTRAL_NAMES | {
    "model.layers.{}.block_sparse_moe.e_score_correction_bias": "blocks.{}.mlp.router.correction",
}  # fmt: skip


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(head_dim=128, max_position_embeddings=196608, rope_theta=5e6, num_experts_per_tok=8)
    file.expect(router_jitter_noise=0, scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer")
    file.expect(use_routing_bias=True, shared_intermediate_size=0, sliding_window=None)
    # Of layers that its weights do not have, or that predict further tokens.
    file.ignore("attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta")
    file.ignore("layernorm_mlp_beta", "mlp_intermediate_size", "shared_moe_mode")
    file.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    head_dim, norm = read.head_dim(file), read.rms_norm(file)
    file.assume(partial_rotary_factor=file.integer("rotary_dim", head_dim) / head_dim)
    attention = read.attention(file, read.rope(file, partial=True), query_key_norm=norm, norm_all_heads=True)
    router = {"scores": "sigmoid", "correction": True}
    experts = read.experts(file, read.num_experts(file, 256), "intermediate_size", router=router)
    layers = [LayerConfig(attention, experts)] * read.num_layers(file)
    return read.decoder(file, layers, norm, router_loss=read.router_loss(file))


FAMILY = Family(read_config, NAMES)
