"""Qwen3 (dense): Llama with normalised queries and keys, and a head size of its own."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family
from tune.models.families.llama import NAMES as LLAMA_NAMES

NAMES = LLAMA_NAMES | {
    "model.layers.{}.self_attn.q_norm": "blocks.{}.attention.query_norm",
    "model.layers.{}.self_attn.k_norm": "blocks.{}.attention.key_norm",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.expect("hidden_act", "silu")
    file.expect("attention_dropout", 0)
    file.expect("use_sliding_window", False)
    file.expect_all("layer_types", "full_attention")
    file.get("sliding_window"), file.get("max_window_layers")  # without effect while use_sliding_window is false
    num_heads, head_dim = file.integer("num_attention_heads"), file.integer("head_dim", default=128)
    return DecoderConfig(
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        intermediate_size=file.integer("intermediate_size"),
        num_layers=file.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=file.integer("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        norm_eps=file.get("rms_norm_eps", 1e-6),
        rope=file.rope(head_dim, default_theta=10000.0, default_positions=32768),
        tied_head=file.get("tie_word_embeddings", False),
        attention_bias=file.get("attention_bias", False),
        query_key_norm=True,
        initializer_range=file.get("initializer_range", 0.02),
    )


FAMILY = Family(read_config, NAMES, not_weights=("lm_head.weight",))
