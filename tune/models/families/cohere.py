"""Command R, R7B and A: attention and feed-forward read the same layer norm; neighboring dimensions are pairs."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES
from tune.models.layers import NormConfig


def read_cohere(file: ConfigFile) -> DecoderConfig:
    file.set_defaults(max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=True, logit_scale=0.0625)
    file.expect(use_qk_norm=False)
    attention = read.attention(file, read.rope(file, interleaved=True), bias_field="attention_bias")
    return _decoder(file, LayerConfig(attention, read.mlp(file), parallel=True))


def read_cohere2(file: ConfigFile) -> DecoderConfig:
    """Command R with windows; full layers do not rotate."""
    file.set_defaults(sliding_window=4096, max_position_embeddings=8192, tie_word_embeddings=True, logit_scale=0.0625)
    file.expect(  # fields of older files, with the only values that transformers supports
        position_embedding_type="rope_gptj", rotary_pct=1.0, use_gated_activation=True, use_parallel_block=True,
        use_qk_norm=False, use_embedding_sharing=True, order_of_interleaved_layers="local_attn_first",
    )  # fmt: skip
    file.ignore("use_parallel_embedding", "layer_switch")
    every = file.integer("sliding_window_pattern", 4)
    windows = read.windows(file, lambda index: (index + 1) % every != 0)
    layer = LayerConfig(read.attention(file, None, bias_field="attention_bias"), read.mlp(file), parallel=True)
    return _decoder(file, read.with_windows(layer, windows, sliding_rope=read.rope(file, interleaved=True)))


def _decoder(file: ConfigFile, layers: LayerConfig | list[LayerConfig]) -> DecoderConfig:
    norm = NormConfig("layer", file.number("layer_norm_eps", 1e-5))
    return read.decoder(file, layers, norm, logit_scale=file.number("logit_scale"))


register("cohere", Family(read_cohere, NAMES))
register("cohere2", Family(read_cohere2, NAMES))
