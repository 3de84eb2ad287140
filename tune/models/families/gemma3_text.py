"""Gemma 3: Gemma 2 with normalised queries and keys, and a rotation for sliding layers of its own."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family, read
from tune.models.families.gemma import read_gemma_norm
from tune.models.families.gemma2 import NAMES as GEMMA2_NAMES
from tune.models.families.gemma2 import read_gemma2_layer

NAMES = GEMMA2_NAMES | {
    "model.layers.{}.self_attn.q_norm": "blocks.{}.attention.query_norm",
    "model.layers.{}.self_attn.k_norm": "blocks.{}.attention.key_norm",
}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(  # files of the multimodal models leave most of these out
        vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=131072,
        tie_word_embeddings=True, query_pre_attn_scalar=256, sliding_window=4096, rope_theta=1e6,
    )  # fmt: skip
    file.ignore("attn_logit_softcapping")  # as transformers does
    full, sliding = read.two_ropes(file, sliding_theta=file.number("rope_local_base_freq", 10000.0))
    norm, every = read_gemma_norm(file), file.integer("sliding_window_pattern", 6)
    windows = read.windows(file, lambda index: (index + 1) % every != 0)
    layers = read.with_windows(read_gemma2_layer(file, full, query_key_norm=norm), windows, sliding)
    multiplier, softcap = file.integer("hidden_size") ** 0.5, file.number_or_none("final_logit_softcapping")
    return read.decoder(file, layers, norm, embedding_multiplier=multiplier, logit_softcap=softcap)


FAMILY = Family(read_config, NAMES)
