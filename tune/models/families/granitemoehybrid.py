"""Granite 4 (dense, as its 350M, 1B and Micro): Granite 3 with gate and up as one. With Mamba or experts: refused."""

from tune.errors import TuneError
from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family, read
from tune.models.families.granite import read_granite
from tune.models.families.llama import NAMES as LLAMA_NAMES

NAMES = LLAMA_NAMES | {
    "model.layers.{}.shared_mlp.input_linear": "blocks.{}.mlp.gate_up",
    "model.layers.{}.shared_mlp.output_linear": "blocks.{}.mlp.down",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    types = file.entries("layer_types", file.entries("layers_block_type", ["linear_attention"]))
    if others := set(types) - {"attention", "full_attention"}:
        raise TuneError(f"{file.path}: layer_types has {sorted(others)}; only attention is supported in this family")
    file.assume(num_local_experts=8, shared_intermediate_size=1024)
    file.expect(num_local_experts=0, normalization_function="rmsnorm")
    file.ignore("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "time_step_limit", "init_method")
    file.ignore(*[name for name in file.fields if name.startswith("mamba_")])
    file.ignore("intermediate_size")  # of experts
    file.fields |= {"intermediate_size": file.integer("shared_intermediate_size")}
    rope = read.rope(file) if file.get("position_embedding_type") == "rope" else None
    return read_granite(file, rope, read.mlp(file, fused=True))


FAMILY = Family(read_config, NAMES)
