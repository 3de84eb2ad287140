"""Gemma 1 to 3: Llama with a scaled embedding, GELU, and norms that multiply by 1 + weight."""

from typing import Any

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES
from tune.models.layers import NormConfig
from tune.models.rope import RopeConfig

GEMMA2_NAMES = NAMES | {
    "model.layers.{}.post_attention_layernorm": "blocks.{}.attention_output_norm",
    "model.layers.{}.pre_feedforward_layernorm": "blocks.{}.mlp_norm",
    "model.layers.{}.post_feedforward_layernorm": "blocks.{}.mlp_output_norm",
}
GEMMA3_TEXT_NAMES = GEMMA2_NAMES | read.QUERY_KEY_NORM_NAMES
GEMMA3_NAMES = {f"language_model.{theirs}": ours for theirs, ours in GEMMA3_TEXT_NAMES.items()}


def read_gemma(file: ConfigFile) -> DecoderConfig:
    file.set_defaults(head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True)
    # Older files have both names of the activation.
    file.expect(use_bidirectional_attention=False, hidden_activation="gelu_pytorch_tanh")
    if file.get("hidden_act", "gelu") == "gelu":  # the first releases have this value, but use the tanh approximation
        file.fields["hidden_act"] = "gelu_pytorch_tanh"
    attention = read.attention(file, read.rope(file), bias_field="attention_bias")
    return _decoder(file, LayerConfig(attention, read.mlp(file)))


def read_gemma2(file: ConfigFile) -> DecoderConfig:
    """Gemma with norms on both sides, windows in every second layer, bounded scores and logits."""
    file.set_defaults(
        head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192, tie_word_embeddings=True,
        query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    )  # fmt: skip
    layer = _gemma2_layer(file, read.rope(file), softcap=file.optional("attn_logit_softcapping", file.number))
    layers = read.with_windows(layer, read.windows(file, lambda index: index % 2 == 0))
    return _decoder(file, layers, logit_softcap=file.optional("final_logit_softcapping", file.number))


def read_gemma3_text(file: ConfigFile) -> DecoderConfig:
    """Gemma 2 with normalized queries and keys, and a separate rotation for sliding layers."""
    file.set_defaults(  # files of multimodal models omit most of these
        vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=131072,
        tie_word_embeddings=True, query_pre_attn_scalar=256, sliding_window=4096, rope_theta=1e6,
    )  # fmt: skip
    file.ignore("attn_logit_softcapping")  # as transformers does
    full, sliding = read.two_ropes(file, sliding_theta=file.number("rope_local_base_freq", 10000.0))
    every = file.integer("sliding_window_pattern", 6)
    windows = read.windows(file, lambda index: (index + 1) % every != 0)
    layers = read.with_windows(_gemma2_layer(file, full, query_key_norm=_norm(file)), windows, sliding)
    return _decoder(file, layers, logit_softcap=file.optional("final_logit_softcapping", file.number))


def read_gemma3(file: ConfigFile) -> DecoderConfig:
    """Gemma 3 that reads images too: the text model is trained, the rest is exported unchanged."""
    file.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    file.ignore("initializer_range")  # the text model has its own
    text = read.language_model(file, tied=True)
    text.expect(model_type="gemma3_text")
    return read_gemma3_text(text)


def _norm(file: ConfigFile) -> NormConfig:
    return NormConfig("rms_offset", file.number("rms_norm_eps", 1e-6))


def _gemma2_layer(file: ConfigFile, rope: RopeConfig, **special: Any) -> LayerConfig:
    file.expect(use_bidirectional_attention=False)
    file.ignore("hidden_act")  # in older files, in addition to hidden_activation, which is used
    scale = file.number("query_pre_attn_scalar") ** -0.5
    attention = read.attention(file, rope, bias_field="attention_bias", scale=scale, **special)
    return LayerConfig(attention, read.mlp(file, "hidden_activation"), norm_after=True)


def _decoder(file: ConfigFile, layers: LayerConfig | list[LayerConfig], **special: Any) -> DecoderConfig:
    return read.decoder(file, layers, _norm(file), embedding_multiplier=file.integer("hidden_size") ** 0.5, **special)


register("gemma", Family(read_gemma, NAMES))
register("gemma2", Family(read_gemma2, GEMMA2_NAMES))
register("gemma3_text", Family(read_gemma3_text, GEMMA3_TEXT_NAMES))
register("gemma3", Family(read_gemma3, GEMMA3_NAMES, ignored=(r"^vision_tower\.", r"^multi_modal_projector\.")))
