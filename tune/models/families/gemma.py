"""Gemma: Llama with a scaled embedding, GELU, and norm weights stored as what they exceed one by."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES
from tune.models.layers import NormConfig


def read_gemma_norm(file: ConfigFile) -> NormConfig:
    return NormConfig("rms_offset", file.number("rms_norm_eps", 1e-6))


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(head_dim=256, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192, tie_word_embeddings=True)
    # Older files have both names of the activation.
    file.expect(use_bidirectional_attention=False, hidden_activation="gelu_pytorch_tanh")
    if file.get("hidden_act") == "gelu":  # so the first releases say, and mean the approximation by tanh
        file.fields["hidden_act"] = "gelu_pytorch_tanh"
    bias = file.flag("attention_bias")
    attention = read.attention(file, read.rope(file), bias=bias, output_bias=bias)
    layers = [LayerConfig(attention, read.mlp(file))] * read.num_layers(file)
    multiplier = file.integer("hidden_size") ** 0.5
    return read.decoder(file, layers, read_gemma_norm(file), embedding_multiplier=multiplier)


FAMILY = Family(read_config, NAMES)
