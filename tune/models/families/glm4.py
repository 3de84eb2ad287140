"""GLM-4 (0414): GLM with norms on both sides of attention and feed-forward."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family, read
from tune.models.families.glm import NAMES as GLM_NAMES
from tune.models.families.glm import read_glm_layer

NAMES = GLM_NAMES | {
    "model.layers.{}.post_self_attn_layernorm": "blocks.{}.attention_output_norm",
    "model.layers.{}.post_mlp_layernorm": "blocks.{}.mlp_output_norm",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    layer = read_glm_layer(file, norm_after=True)
    return read.decoder(file, [layer] * read.num_layers(file), read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
