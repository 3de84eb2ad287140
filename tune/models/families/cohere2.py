"""Command R7B and A: attention and feed-forward off one layer norm; full layers do not rotate."""

from typing import Any

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.llama import NAMES
from tune.models.layers import NormConfig

# What older files say of the architecture, and transformers takes for granted.
FIXED: dict[str, Any] = {
    "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_gated_activation": True, "use_parallel_block": True,
    "use_qk_norm": False, "use_embedding_sharing": True, "order_of_interleaved_layers": "local_attn_first",
}  # fmt: skip


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(sliding_window=4096, max_position_embeddings=8192, tie_word_embeddings=True, logit_scale=0.0625)
    file.expect(**FIXED)
    file.ignore("use_parallel_embedding", "layer_switch")
    bias, every = file.flag("attention_bias"), file.integer("sliding_window_pattern", 4)
    attention = read.attention(file, None, bias=bias, output_bias=bias)
    windows = read.windows(file, lambda index: (index + 1) % every != 0)
    layer = LayerConfig(attention, read.mlp(file), parallel=True)
    layers = read.with_windows(layer, windows, sliding_rope=read.rope(file, interleaved=True))
    norm = NormConfig("layer", file.number("layer_norm_eps", 1e-5))
    return read.decoder(file, layers, norm, logit_scale=file.number("logit_scale"))


FAMILY = Family(read_config, NAMES)
