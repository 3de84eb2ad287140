"""Command R: attention and feed-forward off one layer norm, neighbouring dimensions as rotated pairs."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES
from tune.models.layers import NormConfig


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=True, logit_scale=0.0625)
    file.expect(use_qk_norm=False)
    bias, rope = file.flag("attention_bias"), read.rope(file, interleaved=True)
    layer = LayerConfig(read.attention(file, rope, bias=bias, output_bias=bias), read.mlp(file), parallel=True)
    norm = NormConfig("layer", file.number("layer_norm_eps", 1e-5))
    return read.decoder(file, [layer] * read.num_layers(file), norm, logit_scale=file.number("logit_scale"))


FAMILY = Family(read_config, NAMES)
