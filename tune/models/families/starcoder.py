"""StarCoder2: layer norms with biases, biases everywhere, a feed-forward without a gate."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES as LLAMA_NAMES
from tune.models.layers import NormConfig

NAMES = LLAMA_NAMES | {
    "model.layers.{}.mlp.c_fc": "blocks.{}.mlp.up",
    "model.layers.{}.mlp.c_proj": "blocks.{}.mlp.down",
}


def read_starcoder2(file: ConfigFile) -> DecoderConfig:
    file.set_defaults(
        hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, initializer_range=0.018042, use_bias=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    file.expect(mlp_type="default", norm_type="layer_norm")
    file.without_dropout("residual_dropout", "embedding_dropout")
    attention = read.attention(file, read.rope(file), bias_field="use_bias")
    layer = LayerConfig(attention, read.mlp(file, bias=file.flag("use_bias"), gated=False))
    norm = NormConfig("layer", file.number("norm_epsilon", 1e-5), bias=True)
    return read.decoder(file, read.with_windows(layer, read.windows(file)), norm)


register("starcoder2", Family(read_starcoder2, NAMES))
