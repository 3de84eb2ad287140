"""Gemma 2: Gemma with norms on both sides, windows in every second layer, bounded scores and logits."""

from typing import Any

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.gemma import read_gemma_norm
from tune.models.families.llama import NAMES as LLAMA_NAMES
from tune.models.rope import RopeConfig

NAMES = LLAMA_NAMES | {
    "model.layers.{}.post_attention_layernorm": "blocks.{}.attention_output_norm",
    "model.layers.{}.pre_feedforward_layernorm": "blocks.{}.mlp_norm",
    "model.layers.{}.post_feedforward_layernorm": "blocks.{}.mlp_output_norm",
}


def read_gemma2_layer(file: ConfigFile, rope: RopeConfig, **special: Any) -> LayerConfig:
    file.expect(use_bidirectional_attention=False)
    file.ignore("hidden_act")  # older files have it beside the field that counts
    bias, scale = file.flag("attention_bias"), file.number("query_pre_attn_scalar") ** -0.5
    attention = read.attention(file, rope, bias=bias, output_bias=bias, scale=scale, **special)
    return LayerConfig(attention, read.mlp(file, "hidden_activation"), norm_after=True)


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(
        head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192, tie_word_embeddings=True,
        query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    )  # fmt: skip
    layer = read_gemma2_layer(file, read.rope(file), softcap=file.number_or_none("attn_logit_softcapping"))
    layers = read.with_windows(layer, read.windows(file, lambda index: index % 2 == 0))
    multiplier, softcap = file.integer("hidden_size") ** 0.5, file.number_or_none("final_logit_softcapping")
    return read.decoder(file, layers, read_gemma_norm(file), embedding_multiplier=multiplier, logit_softcap=softcap)


FAMILY = Family(read_config, NAMES)
