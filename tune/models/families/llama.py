"""Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, TinyLlama and kin."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family

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


def read_config(file: ConfigFile) -> DecoderConfig:
    file.expect("hidden_act", "silu")
    file.expect("attention_dropout", 0)
    hidden_size, num_heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    head_dim = file.integer("head_dim", default=hidden_size // num_heads)
    file.get("pretraining_tp")  # how the original training was split; the mathematics is the same
    return DecoderConfig(
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=file.integer("intermediate_size"),
        num_layers=file.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=file.integer("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        norm_eps=file.get("rms_norm_eps", 1e-6),
        rope=file.rope(head_dim, default_theta=10000.0, default_positions=2048),
        tied_head=file.get("tie_word_embeddings", False),
        attention_bias=file.get("attention_bias", False),
        mlp_bias=file.get("mlp_bias", False),
        initializer_range=file.get("initializer_range", 0.02),
    )


# Old checkpoints carry the rotary frequencies, and some of tied models a copy of the embedding as the head.
FAMILY = Family(read_config, NAMES, not_weights=("rotary_emb.inv_freq", "lm_head.weight"))
