"""Ministral 3: Mistral with queries that grow with the logarithm of their position."""

from dataclasses import replace

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES

SCALING = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5)
    scaling = file.mapping("rope_parameters") or dict(SCALING)
    growth, _ = scaling.pop("llama_4_scaling_beta", 0.0), scaling.pop("max_position_embeddings", None)
    rope = replace(read.rope(file, fields=scaling), query_growth=growth)
    layer = LayerConfig(read.attention(file, rope), read.mlp(file))
    return read.decoder(file, read.with_windows(layer, read.windows(file)), read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
