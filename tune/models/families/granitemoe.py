"""Granite 3 with experts (1B-A400M, 3B-A800M): in every layer, and stacked on disk too."""

from dataclasses import replace

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family, read
from tune.models.families.granite import read_granite
from tune.models.families.llama import NAMES as LLAMA_NAMES

NAMES = LLAMA_NAMES | {
    "model.layers.{}.block_sparse_moe.router.layer": "blocks.{}.mlp.router",
    "model.layers.{}.block_sparse_moe.input_linear": "blocks.{}.mlp.experts.gate_up",
    "model.layers.{}.block_sparse_moe.output_linear": "blocks.{}.mlp.experts.down",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(num_experts_per_tok=2)
    router = {"scores": "softmax_of_chosen"}
    experts = read.experts(file, read.num_experts(file, 8), "intermediate_size", router=router, fused="halves")
    return replace(read_granite(file, read.rope(file), experts), router_loss=read.router_loss(file))


FAMILY = Family(read_config, NAMES)
