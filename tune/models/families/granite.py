"""Granite 3 and 4: Llama with four multipliers, dense or with experts."""

from typing import Any

from tune.errors import TuneError
from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES
from tune.models.layers import PartConfig
from tune.models.rope import RopeConfig

MOE_NAMES = NAMES | {
    "model.layers.{}.block_sparse_moe.router.layer": "blocks.{}.mlp.router",
    "model.layers.{}.block_sparse_moe.input_linear": "blocks.{}.mlp.experts.gate_up",
    "model.layers.{}.block_sparse_moe.output_linear": "blocks.{}.mlp.experts.down",
}
HYBRID_NAMES = NAMES | {
    "model.layers.{}.shared_mlp.input_linear": "blocks.{}.mlp.gate_up",
    "model.layers.{}.shared_mlp.output_linear": "blocks.{}.mlp.down",
}


def read_granite(file: ConfigFile) -> DecoderConfig:
    return _decoder(file, read.rope(file), read.mlp(file, bias=file.flag("mlp_bias")))


def read_granitemoe(file: ConfigFile) -> DecoderConfig:
    """Granite 3 with experts (1B-A400M, 3B-A800M): in every layer, and stacked on disk too."""
    file.set_defaults(num_experts_per_tok=2)
    router = {"scores": "softmax_of_chosen"}
    experts = read.experts(file, read.num_experts(file, 8), "intermediate_size", router=router, fused="halves")
    return _decoder(file, read.rope(file), experts, router_loss=read.router_loss(file))


def read_granitemoehybrid(file: ConfigFile) -> DecoderConfig:
    """Granite 4, dense (350M, 1B, Micro): gate and up are one projection. Mamba layers and experts are refused."""
    types = file.entries("layer_types", file.entries("layers_block_type", ["linear_attention"]))
    if others := set(types) - {"attention", "full_attention"}:
        raise TuneError(f"{file.path}: layer_types has {sorted(others)}; only attention is supported in this family")
    file.set_defaults(num_local_experts=8, shared_intermediate_size=1024)
    file.expect(num_local_experts=0, normalization_function="rmsnorm")
    file.ignore("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "time_step_limit", "init_method")
    file.ignore(*[name for name in file.fields if name.startswith("mamba_")])
    file.ignore("intermediate_size")  # of experts
    file.fields |= {"intermediate_size": file.integer("shared_intermediate_size")}
    rope = read.rope(file) if file.get("position_embedding_type") == "rope" else None
    return _decoder(file, rope, read.mlp(file, fused=True))


def _decoder(file: ConfigFile, rope: RopeConfig | None, mlp: PartConfig, **special: Any) -> DecoderConfig:
    scale = file.number("attention_multiplier", 1.0)
    attention = read.attention(file, rope, bias_field="attention_bias", scale=scale)
    return read.decoder(
        file,
        LayerConfig(attention, mlp, residual_multiplier=file.number("residual_multiplier", 1.0)),
        embedding_multiplier=file.number("embedding_multiplier", 1.0),
        logit_scale=1 / file.number("logits_scaling", 1.0),
        **special,
    )


register("granite", Family(read_granite, NAMES))
register("granitemoe", Family(read_granitemoe, MOE_NAMES))
register("granitemoehybrid", Family(read_granitemoehybrid, HYBRID_NAMES))
