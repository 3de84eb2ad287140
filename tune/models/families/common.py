"""Reading what most families' config.json has alike, so that a family's file says what is special about it."""

from collections.abc import Callable, Sequence
from typing import Any

from tune.errors import TuneError
from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.layers import AttentionConfig, MLPConfig, NormConfig
from tune.models.rope import RopeConfig

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_decoder(
    file: ConfigFile, layers: Sequence[LayerConfig], norm: NormConfig, *, tied: bool = False, **special: Any
) -> DecoderConfig:
    """`tied` is what files mean that do not say whether the head is the embedding."""
    return DecoderConfig(
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        layers=tuple(layers),
        norm=norm,
        tied_head=file.flag("tie_word_embeddings", tied),
        initializer_range=file.number("initializer_range", 0.02),
        **special,
    )


def read_head_dim(file: ConfigFile, default: int | None = None) -> int:
    return file.integer("head_dim", default or file.integer("hidden_size") // file.integer("num_attention_heads"))


def read_attention(file: ConfigFile, rope: RopeConfig | None, head_dim: int, **special: Any) -> AttentionConfig:
    file.without_dropout("attention_dropout")
    num_heads = file.integer("num_attention_heads")
    num_kv_heads = file.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise TuneError(
            f"{file.path}: num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    return AttentionConfig(num_heads, num_kv_heads, head_dim, rope, **special)


def read_mlp(file: ConfigFile, activation: str = "hidden_act", default: str = "silu", **special: Any) -> MLPConfig:
    """`activation` is the name of its field."""
    name = file.get(activation, default)
    if name not in ACTIVATION_NAMES:
        raise TuneError(
            f"{file.path}: {activation}={name!r} is not supported; supported: {', '.join(ACTIVATION_NAMES)}"
        )
    return MLPConfig(file.integer("intermediate_size"), ACTIVATION_NAMES[name], **special)


def read_rms_norm(file: ConfigFile, default_eps: float = 1e-6) -> NormConfig:
    return NormConfig("rms", file.number("rms_norm_eps", default_eps))


def read_windows(file: ConfigFile, slides: Callable[[int], bool], default: int | None = None) -> list[int | None]:
    """Each layer's window: `sliding_window` where `layer_types`, or in files without them `slides(layer)`, says so."""
    window, num_layers = file.get("sliding_window", default), file.integer("num_hidden_layers")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise TuneError(f"{file.path}: sliding_window must be a positive integer or null; found {window!r}")
    names = {True: "sliding_attention", False: "full_attention"}
    types = file.get("layer_types", [names[slides(layer)] for layer in range(num_layers)])
    if unknown := set(types) - set(names.values()):
        raise TuneError(f"{file.path}: layer_types has {sorted(unknown)}; supported: sliding_attention, full_attention")
    if len(types) != num_layers:
        raise TuneError(f"{file.path}: layer_types has {len(types)} entries for num_hidden_layers={num_layers}")
    return [window if name == names[True] else None for name in types]
