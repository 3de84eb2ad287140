"""Llama and close relatives: Arcee AFM, ERNIE 4.5, Phi, Seed-OSS, SmolLM3, StarCoder2."""

from dataclasses import replace

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.layers import NormConfig

NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers.{}.input_layernorm": "blocks.{}.attention_norm",
    "model.layers.{}.self_attn.q_proj": "blocks.{}.attention.query",
    "model.layers.{}.self_attn.k_proj": "blocks.{}.attention.key",
    "model.layers.{}.self_attn.v_proj": "blocks.{}.attention.value",
    "model.layers.{}.self_attn.o_proj": "blocks.{}.attention.output",
    "model.layers.{}.post_attention_layernorm": "blocks.{}.mlp_norm",
    "model.layers.{}.mlp.gate_proj": "blocks.{}.mlp.gate",
    "model.layers.{}.mlp.up_proj": "blocks.{}.mlp.up",
    "model.layers.{}.mlp.down_proj": "blocks.{}.mlp.down",
    "model.norm": "norm",
    "lm_head": "head",
}
PHI3_NAMES = NAMES | {
    "model.layers.{}.self_attn.qkv_proj": "blocks.{}.attention.query_key_value",
    "model.layers.{}.mlp.gate_up_proj": "blocks.{}.mlp.gate_up",
}
STARCODER2_NAMES = NAMES | {
    "model.layers.{}.mlp.c_fc": "blocks.{}.mlp.up",
    "model.layers.{}.mlp.c_proj": "blocks.{}.mlp.down",
}


def read_llama(file: ConfigFile) -> DecoderConfig:
    """Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, TinyLlama and kin."""
    file.ignore("pretraining_tp")  # parallelism of the original training
    attention = read.attention(file, read.rope(file), bias_field="attention_bias")
    return read.decoder(file, LayerConfig(attention, read.mlp(file, bias=file.flag("mlp_bias"))))


def read_arcee(file: ConfigFile) -> DecoderConfig:
    """Llama with a feed-forward of squared ReLU without a gate."""
    file.set_defaults(hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-5)
    attention = read.attention(file, read.rope(file), bias_field="attention_bias")
    return read.decoder(file, LayerConfig(attention, read.mlp(file, gated=False, bias=file.flag("mlp_bias"))))


def read_ernie4_5(file: ConfigFile) -> DecoderConfig:
    """Dense: Llama that rotates neighboring dimensions as pairs."""
    file.set_defaults(
        head_dim=128, num_key_value_heads=2, rope_theta=500000.0, max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip
    attention = read.attention(file, read.rope(file, interleaved=True), bias_field="use_bias")
    return read.decoder(file, LayerConfig(attention, read.mlp(file, bias=file.flag("use_bias"))))


def read_phi3(file: ConfigFile) -> DecoderConfig:
    """Phi-3, 3.5 and 4: fused projections, LongRoPE, a part of each head rotated."""
    file.set_defaults(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5)
    file.expect(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)
    file.without_dropout("resid_pdrop", "embd_pdrop")
    scaling = read.rope_fields(file)
    if "short_factor" in scaling:  # older files call longrope su or yarn
        scaling |= {"rope_type": "longrope"}
    attention = read.attention(file, read.rope(file, partial=True, fields=scaling), fused=True)
    layer = LayerConfig(attention, read.mlp(file, fused=True))
    return read.decoder(file, read.with_windows(layer, read.windows(file)))


def read_seed_oss(file: ConfigFile) -> DecoderConfig:
    """Llama with biases on queries, keys and values."""
    file.set_defaults(attention_bias=True, max_position_embeddings=524288)
    file.ignore("pretraining_tp")
    file.without_dropout("residual_dropout")
    bias, output_bias = file.flag("attention_bias"), file.flag("attention_out_bias")
    attention = read.attention(file, read.rope(file), bias=bias, output_bias=output_bias)
    return read.decoder(file, LayerConfig(attention, read.mlp(file, bias=file.flag("mlp_bias"))))


def read_smollm3(file: ConfigFile) -> DecoderConfig:
    """Llama with layers that do not rotate."""
    file.set_defaults(rope_theta=2e6, max_position_embeddings=32768, num_key_value_heads=4, tie_word_embeddings=True)
    file.ignore("pretraining_tp", "max_window_layers")
    every = file.integer("no_rope_layer_interval", 4)
    rope, mlp = read.rope(file), read.mlp(file, bias=file.flag("mlp_bias"))
    attention = read.attention(file, rope, bias_field="attention_bias")
    rotate = read.by_layer(file, "no_rope_layers", lambda index: (index + 1) % every != 0)
    windows = read.windows(file, lambda index: not rotate[index], switch="use_sliding_window")
    layers = [
        LayerConfig(replace(attention, window=window, rope=rope if rotates else None), mlp)
        for window, rotates in zip(windows, rotate, strict=True)
    ]
    return read.decoder(file, layers)


def read_starcoder2(file: ConfigFile) -> DecoderConfig:
    """Layer norms with biases, biases everywhere, a feed-forward without a gate."""
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


register("llama", Family(read_llama, NAMES))
register("arcee", Family(read_arcee, NAMES))
register("ernie4_5", Family(read_ernie4_5, NAMES))
register("phi3", Family(read_phi3, PHI3_NAMES))
register("seed_oss", Family(read_seed_oss, NAMES))
register("smollm3", Family(read_smollm3, NAMES))
register("starcoder2", Family(read_starcoder2, STARCODER2_NAMES))
