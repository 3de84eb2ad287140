"""Read the fields of config.json that most families share."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tune.errors import TuneError
from tune.models.config_file import ConfigFile, is_positive
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.layers import AttentionConfig, MLPConfig, NormConfig
from tune.models.moe import ExpertsConfig
from tune.models.rope import RopeConfig
from tune.models.routing import RouterConfig

T = TypeVar("T")

ACTIVATION_NAMES = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}  # fmt: skip

# The fields that `rope_scaling` and `rope_parameters` may have, with their checks.
ROPE_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"), is_positive),
    **dict.fromkeys(("attention_factor", "low_freq_factor", "high_freq_factor"), is_positive),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), is_positive),
    **dict.fromkeys(
        ("short_factor", "long_factor"), lambda value: isinstance(value, list) and all(map(is_positive, value))
    ),
    **dict.fromkeys(("truncate", "finetuned"), lambda value: isinstance(value, bool)),
}
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def decoder(
    file: ConfigFile, layers: LayerConfig | Sequence[LayerConfig], norm: NormConfig | None = None, **special: Any
) -> DecoderConfig:
    """The decoder with `layers`: one config for all layers, or one for each. `norm=None` means `rms_norm`."""
    return DecoderConfig(
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        layers=(layers,) * file.integer("num_hidden_layers") if isinstance(layers, LayerConfig) else tuple(layers),
        norm=norm or rms_norm(file),
        tied_head=file.flag("tie_word_embeddings"),
        initializer_range=file.number("initializer_range", 0.02),
        **special,
    )


def language_model(file: ConfigFile, *, tied: bool) -> ConfigFile:
    """The section of the language model in the file of a larger model. As in transformers, the outer field decides
    whether its head is tied; `tied` is that field's default."""
    text = file.section("text_config")
    text.fields |= {"tie_word_embeddings": file.flag("tie_word_embeddings", tied)}
    return text


def by_layer(file: ConfigFile, name: str, default: Callable[[int], T], known: Collection[T] = ()) -> list[T]:
    """A list with an entry for each layer; entries must be in `known`, if given."""
    count = file.integer("num_hidden_layers")
    found = file.entries(name, [default(layer) for layer in range(count)])
    if len(found) != count:
        raise TuneError(f"{file.path}: {name} has {len(found)} entries for num_hidden_layers={count}")
    if unknown := [entry for entry in found if known and entry not in known]:
        raise TuneError(f"{file.path}: {name} has {unknown[0]!r}; supported: {', '.join(map(str, known))}")
    return found


def head_dim(file: ConfigFile) -> int:
    if size := file.optional("head_dim", file.integer):
        return size
    hidden_size, num_heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise TuneError(f"{file.path}: hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}")
    return hidden_size // num_heads


def attention(
    file: ConfigFile, rope: RopeConfig | None, *, bias_field: str | None = None, **special: Any
) -> AttentionConfig:
    """The attention config. `bias_field` is the name of the flag that gives all four projections a bias."""
    file.without_dropout("attention_dropout")
    if bias_field:
        special["bias"] = special["output_bias"] = file.flag(bias_field)
    num_heads = file.integer("num_attention_heads")
    num_kv_heads = file.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise TuneError(
            f"{file.path}: num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    return AttentionConfig(num_heads, num_kv_heads, head_dim(file), rope, **special)


def mlp(file: ConfigFile, activation: str = "hidden_act", **special: Any) -> MLPConfig:
    """The feed-forward config. `activation` is the name of the activation's field."""
    file.set_defaults(**{activation: "silu"})
    name = ACTIVATION_NAMES[file.choice(activation, ACTIVATION_NAMES)]
    return MLPConfig(file.integer("intermediate_size"), name, **special)


def rms_norm(file: ConfigFile) -> NormConfig:
    return NormConfig("rms", file.number("rms_norm_eps", 1e-6))


def windows(
    file: ConfigFile, slides: Callable[[int], bool] = lambda layer: True, switch: str | None = None
) -> list[int | None]:
    """Each layer's window: `sliding_window` in sliding layers, by `layer_types` or, if it is missing, `slides(layer)`.

    `switch` is the name of the flag that turns windows on in this family.
    """
    on, sliding, full = switch is None or file.flag(switch), "sliding_attention", "full_attention"
    window = file.optional("sliding_window", file.integer) if on else None
    file.ignore("sliding_window")  # 0 in some files where windows are off
    types = by_layer(file, "layer_types", lambda layer: sliding if slides(layer) else full, (sliding, full))
    return [window if name == sliding else None for name in types]


def with_windows(
    layer: LayerConfig, windows: list[int | None], sliding_rope: RopeConfig | None = None
) -> list[LayerConfig]:
    """`layer` with each of the windows. Layers with a window use `sliding_rope`, if given."""
    assert isinstance(layer.attention, AttentionConfig)
    sliding = replace(layer.attention, rope=sliding_rope or layer.attention.rope)
    return [replace(layer, attention=replace(sliding, window=window)) if window else layer for window in windows]


def rope_fields(file: ConfigFile) -> dict[str, Any]:
    """The rope fields of older files (`rope_scaling`, next to `rope_theta`) or newer files (`rope_parameters`)."""
    return file.mapping("rope_scaling") | file.mapping("rope_parameters")


def rope(
    file: ConfigFile,
    size: int | None = None,
    *,
    partial: bool = False,
    interleaved: bool = False,
    fields: dict[str, Any] | None = None,
) -> RopeConfig:
    """The rotary embedding. `size` defaults to the head size; `partial` allows the family to rotate a part of it.
    `fields` replace `rope_fields(file)`.
    """
    fields = rope_fields(file) if fields is None else fields
    fields = {name: value for name, value in fields.items() if value is not None}
    kind = str(fields.pop("rope_type", None) or fields.get("type") or "default")
    fields.pop("type", None)
    max_positions = file.integer("max_position_embeddings", 2048)
    if original := file.get("original_max_position_embeddings"):
        fields["original_max_position_embeddings"] = original
    if kind in ("llama3", "yarn", "longrope"):  # some exporters omit it and mean the trained length
        fields.setdefault("original_max_position_embeddings", max_positions)
    fields.setdefault("rope_theta", file.number("rope_theta", 10000.0))
    fields.setdefault("partial_rotary_factor", file.number("partial_rotary_factor", 1.0))
    for name in NEEDED.get(kind, ()):
        if name not in fields:
            raise TuneError(f"{file.path}: rope scaling '{kind}' has no '{name}'")
    for name, value in fields.items():
        if name not in ROPE_FIELDS or not ROPE_FIELDS[name](value):
            raise TuneError(f"{file.path}: rope scaling '{kind}' has an unsupported field: {name}={value!r}")
    theta, share = fields.pop("rope_theta"), fields.pop("partial_rotary_factor")
    if share != 1 and not partial:
        raise TuneError(f"{file.path}: partial_rotary_factor={share} is not supported in this family")
    rotated = int((size or head_dim(file)) * share)
    if rotated % 2:
        raise TuneError(f"{file.path}: {rotated} dimensions of a head cannot be rotated in pairs")
    for name in {"short_factor", "long_factor"} & fields.keys():
        if len(fields[name]) != rotated // 2:
            raise TuneError(f"{file.path}: {name} must have {rotated // 2} numbers; found {len(fields[name])}")
    return RopeConfig(rotated, max_positions, theta, kind, fields, interleaved)


def two_ropes(file: ConfigFile, sliding_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of full and of sliding layers. In older files, `rope_scaling` is for full layers only."""
    types = file.section("rope_parameters")
    file.integer("sliding_window")  # required: layers with a window use the second rotation
    full = file.mapping("rope_scaling") | types.mapping("full_attention")
    sliding = {"rope_theta": sliding_theta} | types.mapping("sliding_attention")
    return rope(file, fields=full), rope(file, fields=sliding)


QUERY_KEY_NORM_NAMES = {
    "model.layers.{}.self_attn.q_norm": "blocks.{}.attention.query_norm",
    "model.layers.{}.self_attn.k_norm": "blocks.{}.attention.key_norm",
}
EXPERT_NAMES = {
    "model.layers.{}.mlp.gate": "blocks.{}.mlp.router",
    "model.layers.{}.mlp.experts.{}.gate_proj": "blocks.{}.mlp.experts.gate",
    "model.layers.{}.mlp.experts.{}.up_proj": "blocks.{}.mlp.experts.up",
    "model.layers.{}.mlp.experts.{}.down_proj": "blocks.{}.mlp.experts.down",
}


def num_experts(file: ConfigFile, default: int) -> int:
    """The number of experts, for which exporters use two names."""
    older, newer = file.get("num_experts"), file.get("num_local_experts")
    if older is not None and newer is not None:
        file.expect(num_local_experts=older)
    return file.integer("num_local_experts" if older is None else "num_experts", default)


def experts(
    file: ConfigFile, count: int, size: str = "moe_intermediate_size", *, router: dict[str, Any], **special: Any
) -> ExpertsConfig:
    """The experts' config. `size` is the name of its field; `router` has the arguments of `RouterConfig` that differ
    from its defaults."""
    config = RouterConfig(count, file.integer("num_experts_per_tok"), **router)
    groups, kept = config.num_groups, config.kept_groups
    group = count // groups
    if count % groups or (groups > 1 and group < 2) or kept > groups or config.chosen > group * kept:
        raise TuneError(
            f"{file.path}: num_experts_per_tok={config.chosen} cannot be chosen from {count} experts in {groups} "
            f"groups of two or more, with topk_group={kept}"
        )
    return ExpertsConfig(config, file.integer(size), mlp(file).activation, **special)


def router_loss(file: ConfigFile) -> float:
    """The weight of the load-balancing loss; 0 if `output_router_logits` is off."""
    trained, coefficient = file.flag("output_router_logits"), file.get("router_aux_loss_coef", 0.001)
    return file.number("router_aux_loss_coef", 0.001) if trained and coefficient else 0.0
