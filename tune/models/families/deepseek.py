"""DeepSeek-V3, R1 and models with the same design: latent attention, experts chosen by corrected sigmoids."""

import math

from tune.errors import TuneError
from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES as LLAMA_NAMES
from tune.models.latent_attention import LatentAttentionConfig
from tune.models.layers import AttentionPartConfig, NormConfig
from tune.models.moe import ExpertsConfig

CORRECTED_EXPERT_NAMES = read.EXPERT_NAMES | {
    "model.layers.{}.mlp.gate.e_score_correction_bias": "blocks.{}.mlp.router.correction",
    "model.layers.{}.mlp.shared_experts.gate_proj": "blocks.{}.mlp.shared.gate",
    "model.layers.{}.mlp.shared_experts.up_proj": "blocks.{}.mlp.shared.up",
    "model.layers.{}.mlp.shared_experts.down_proj": "blocks.{}.mlp.shared.down",
}
NAMES = LLAMA_NAMES | CORRECTED_EXPERT_NAMES | {
    "model.layers.{}.self_attn.q_a_proj": "blocks.{}.attention.query_down",
    "model.layers.{}.self_attn.q_a_layernorm": "blocks.{}.attention.query_norm",
    "model.layers.{}.self_attn.q_b_proj": "blocks.{}.attention.query_up",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa": "blocks.{}.attention.key_value_down",
    "model.layers.{}.self_attn.kv_a_layernorm": "blocks.{}.attention.key_value_norm",
    "model.layers.{}.self_attn.kv_b_proj": "blocks.{}.attention.key_value_up",
}  # fmt: skip
IGNORED = (r"rotary_emb\.inv_freq$", r"^model\.layers\.{num_layers}\.")  # the last layer is for multi-token prediction


def read_deepseek_v3(file: ConfigFile) -> DecoderConfig:
    file.set_defaults(
        max_position_embeddings=4096, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_group=8,
        topk_group=4, routed_scaling_factor=2.5, first_k_dense_replace=3,
    )  # fmt: skip
    return read.decoder(file, read_layers(file, _latent_attention(file)))


def read_layers(file: ConfigFile, attention: AttentionPartConfig) -> list[LayerConfig]:
    """The configs of all layers: the first ones dense, the others with experts."""
    mlp, experts, dense = read.mlp(file), _corrected_experts(file), file.integer("first_k_dense_replace", minimum=0)
    layers = range(file.integer("num_hidden_layers"))
    return [LayerConfig(attention, mlp if layer < dense else experts) for layer in layers]


def _latent_attention(file: ConfigFile) -> LatentAttentionConfig:
    file.without_dropout("attention_dropout")
    file.ignore("head_dim", "qk_head_dim")  # sums and copies of the sizes below
    num_heads = file.integer("num_attention_heads")
    file.expect(num_key_value_heads=num_heads)
    plain, rotated = file.integer("qk_nope_head_dim"), file.integer("qk_rope_head_dim")
    rope = read.rope(file, rotated, interleaved=file.flag("rope_interleave", True))
    scale, growth = (plain + rotated) ** -0.5, rope.scaling.get("mscale_all_dim", 0)
    if rope.kind != "default" and growth:
        if "factor" not in rope.scaling:
            raise TuneError(f"{file.path}: rope scaling '{rope.kind}' with mscale_all_dim has no 'factor'")
        scale *= (0.1 * growth * math.log(max(1, rope.scaling["factor"])) + 1) ** 2
    query_rank = file.optional("q_lora_rank", file.integer)
    return LatentAttentionConfig(
        num_heads, plain, file.integer("v_head_dim"), rope, file.integer("kv_lora_rank"), query_rank,
        NormConfig("rms", 1e-6), scale, file.flag("attention_bias"),
    )  # fmt: skip


def _corrected_experts(file: ConfigFile) -> ExpertsConfig:
    file.set_defaults(routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=1)
    file.expect(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    # Settings of pretraining and its parallelism. Fine-tuning has no load-balancing loss.
    file.ignore("ep_size", "pretraining_tp", "aux_loss_alpha", "seq_aux", "output_router_logits")
    file.ignore("num_nextn_predict_layers", "num_mtp_layers")
    router = {
        "scores": "sigmoid", "correction": True, "normalized": file.flag("norm_topk_prob", True),
        "num_groups": file.integer("n_group"), "kept_groups": file.integer("topk_group"),
        "scale": file.number("routed_scaling_factor"),
    }  # fmt: skip
    shared = file.integer("n_shared_experts") * file.integer("moe_intermediate_size")
    return read.experts(file, file.integer("n_routed_experts"), router=router, shared=shared)


for model_type in ("deepseek_v3", "kimi_k2"):  # kimi_k2 has its own code in the folder, which computes the same
    register(model_type, Family(read_deepseek_v3, NAMES, IGNORED))
