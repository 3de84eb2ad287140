"""Mistral: Llama with a sliding window in all layers, or in none; with experts: Mixtral, and MiniMax-M2."""

from dataclasses import replace

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES

MISTRAL3_NAMES = {f"language_model.{theirs}": ours for theirs, ours in NAMES.items()}
MIXTRAL_NAMES = NAMES | {
    "model.layers.{}.block_sparse_moe.gate": "blocks.{}.mlp.router",
    "model.layers.{}.block_sparse_moe.experts.{}.w1": "blocks.{}.mlp.experts.gate",
    "model.layers.{}.block_sparse_moe.experts.{}.w3": "blocks.{}.mlp.experts.up",
    "model.layers.{}.block_sparse_moe.experts.{}.w2": "blocks.{}.mlp.experts.down",
}
MINIMAX_NAMES = MIXTRAL_NAMES | read.QUERY_KEY_NORM_NAMES | {
    "model.layers.{}.block_sparse_moe.e_score_correction_bias": "blocks.{}.mlp.router.correction",
}  # fmt: skip
MINISTRAL3_ROPE = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def read_mistral(file: ConfigFile) -> DecoderConfig:
    file.set_defaults(sliding_window=4096, max_position_embeddings=131072)
    layer = LayerConfig(read.attention(file, read.rope(file)), read.mlp(file))
    return read.decoder(file, read.with_windows(layer, read.windows(file)))


def read_ministral3(file: ConfigFile) -> DecoderConfig:
    """Mistral with queries that grow with the logarithm of their position."""
    file.set_defaults(head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5)
    scaling = file.mapping("rope_parameters") or dict(MINISTRAL3_ROPE)
    growth, _ = scaling.pop("llama_4_scaling_beta", 0.0), scaling.pop("max_position_embeddings", None)
    rope = replace(read.rope(file, fields=scaling), query_growth=growth)
    layer = LayerConfig(read.attention(file, rope), read.mlp(file))
    return read.decoder(file, read.with_windows(layer, read.windows(file)))


def read_mistral3(file: ConfigFile) -> DecoderConfig:
    """Mistral Small 3.1, Ministral 3 and others that read images: only the text model is trained."""
    file.ignore("vision_config", "image_token_index", "multimodal_projector_bias", "projector_hidden_act")
    file.ignore("spatial_merge_size", "vision_feature_layer")
    readers = {"mistral": read_mistral, "ministral3": read_ministral3}
    text = read.language_model(file, tied=True)
    return readers[text.choice("model_type", readers)](text)


def read_mixtral(file: ConfigFile) -> DecoderConfig:
    """Mistral with experts in every layer."""
    file.set_defaults(max_position_embeddings=131072, rope_theta=1e6, rms_norm_eps=1e-5, num_experts_per_tok=2)
    file.expect(router_jitter_noise=0)
    experts = read.experts(file, read.num_experts(file, 8), "intermediate_size", router={"normalized": True})
    layer = LayerConfig(read.attention(file, read.rope(file)), experts)
    return read.decoder(file, read.with_windows(layer, read.windows(file)), router_loss=read.router_loss(file))


def read_minimax_m2(file: ConfigFile) -> DecoderConfig:
    """Experts chosen by corrected sigmoids; all heads of queries, and all of keys, share one norm."""
    file.set_defaults(head_dim=128, max_position_embeddings=196608, rope_theta=5e6, num_experts_per_tok=8)
    file.expect(router_jitter_noise=0, scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer")
    file.expect(use_routing_bias=True, shared_intermediate_size=0, sliding_window=None)
    # Fields of layers that the released weights do not have, and of multi-token prediction.
    file.ignore("attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta")
    file.ignore("layernorm_mlp_beta", "mlp_intermediate_size", "shared_moe_mode")
    file.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    head_dim, norm = read.head_dim(file), read.rms_norm(file)
    file.set_defaults(partial_rotary_factor=file.integer("rotary_dim", head_dim) / head_dim)
    attention = read.attention(file, read.rope(file, partial=True), query_key_norm=norm, norm_all_heads=True)
    router = {"scores": "sigmoid", "correction": True}
    experts = read.experts(file, read.num_experts(file, 256), "intermediate_size", router=router)
    return read.decoder(file, LayerConfig(attention, experts), router_loss=read.router_loss(file))


register("mistral", Family(read_mistral, NAMES))
register("ministral3", Family(read_ministral3, NAMES))
register("mistral3", Family(read_mistral3, MISTRAL3_NAMES, ignored=(r"^vision_tower\.", r"^multi_modal_projector\.")))
register("mixtral", Family(read_mixtral, MIXTRAL_NAMES))
register("minimax_m2", Family(read_minimax_m2, MINIMAX_NAMES))
