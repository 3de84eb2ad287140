"""ERNIE 4.5 (dense): Llama with neighbouring dimensions as rotated pairs."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(
        head_dim=128, num_key_value_heads=2, rope_theta=500000.0, max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip
    bias = file.flag("use_bias")
    rope = read.rope(file, interleaved=True)
    layer = LayerConfig(read.attention(file, rope, bias=bias, output_bias=bias), read.mlp(file, bias=bias))
    return read.decoder(file, [layer] * read.num_layers(file), read.rms_norm(file))


FAMILY = Family(read_config, NAMES)
