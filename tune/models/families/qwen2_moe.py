"""Qwen1.5-MoE and Qwen2 (57B-A14B): Qwen2 with experts in some layers or all, and a shared one behind a gate."""

from collections.abc import Callable
from dataclasses import replace

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES as LLAMA_NAMES
from tune.models.moe import ExpertsConfig

NAMES = LLAMA_NAMES | read.EXPERT_NAMES | {
    "model.layers.{}.mlp.shared_expert.gate_proj": "blocks.{}.mlp.shared.gate",
    "model.layers.{}.mlp.shared_expert.up_proj": "blocks.{}.mlp.shared.up",
    "model.layers.{}.mlp.shared_expert.down_proj": "blocks.{}.mlp.shared.down",
    "model.layers.{}.mlp.shared_expert_gate": "blocks.{}.mlp.shared_gate",
}  # fmt: skip


def read_windows_if_used(file: ConfigFile, slides: Callable[[int], bool]) -> list[int | None]:
    """`slides` is for files without `layer_types`. Files that use no windows may name one all the same."""
    file.ignore("max_window_layers")
    if file.flag("use_sliding_window"):
        return read.windows(file, slides)
    num_layers = read.num_layers(file)
    file.ignore("sliding_window")
    file.expect(layer_types=["full_attention"] * num_layers)
    return [None] * num_layers


def with_experts(file: ConfigFile, layers: list[LayerConfig], experts: ExpertsConfig) -> list[LayerConfig]:
    """Every `decoder_sparse_step`-th layer with experts, but for `mlp_only_layers`."""
    step, dense = file.integer("decoder_sparse_step", 1), file.entries("mlp_only_layers", [])
    return [
        layer if number in dense or (number + 1) % step else replace(layer, mlp=experts)
        for number, layer in enumerate(layers)
    ]


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(
        max_position_embeddings=32768, sliding_window=4096, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    )  # fmt: skip
    rope, bias = read.rope(file), file.flag("qkv_bias", True)
    layer = LayerConfig(read.attention(file, rope, bias=bias), read.mlp(file))
    first_full = file.integer("max_window_layers", 28, minimum=0)
    windows = read_windows_if_used(file, lambda number: number % 2 == 0 and number < first_full)
    experts = read.experts(
        file, read.num_experts(file, 60), router={"normalized": file.flag("norm_topk_prob")},
        shared=file.integer("shared_expert_intermediate_size"), shared_gate=True,
    )  # fmt: skip
    layers = with_experts(file, read.with_windows(layer, windows), experts)
    return read.decoder(file, layers, read.rms_norm(file), router_loss=read.router_loss(file))


FAMILY = Family(read_config, NAMES)
