"""OLMo 2, OLMo 3, OLMoE and EXAONE 4: norms of queries and keys; norms after the parts, but before them in OLMoE."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES as LLAMA_NAMES
from tune.models.layers import AttentionConfig
from tune.models.rope import RopeConfig

NAMES = LLAMA_NAMES | read.QUERY_KEY_NORM_NAMES | {
    "model.layers.{}.post_attention_layernorm": "blocks.{}.attention_output_norm",
    "model.layers.{}.post_feedforward_layernorm": "blocks.{}.mlp_output_norm",
}  # fmt: skip
MOE_NAMES = LLAMA_NAMES | read.QUERY_KEY_NORM_NAMES | read.EXPERT_NAMES


def read_olmo2(file: ConfigFile) -> DecoderConfig:
    """All heads of queries, and all of keys, share one norm."""
    file.set_defaults(rms_norm_eps=1e-5)
    return read.decoder(file, _olmo2_layer(file, read.rope(file)))


def read_olmo3(file: ConfigFile) -> DecoderConfig:
    """OLMo 2 with windows in three of four layers; only the other layers use a scaled rotation."""
    file.set_defaults(rms_norm_eps=1e-5, sliding_window=4096, rope_theta=500000.0)
    full, sliding = read.two_ropes(file, sliding_theta=file.number("rope_theta"))
    windows = read.windows(file, lambda index: (index + 1) % 4 != 0)
    return read.decoder(file, read.with_windows(_olmo2_layer(file, full), windows, sliding))


def read_olmoe(file: ConfigFile) -> DecoderConfig:
    """Experts in every layer; norms before the parts."""
    file.set_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts_per_tok=8, router_aux_loss_coef=0.01)
    file.expect(clip_qkv=None)
    router = {"normalized": file.flag("norm_topk_prob")}
    experts = read.experts(file, read.num_experts(file, 64), "intermediate_size", router=router)
    layer = LayerConfig(_attention(file, read.rope(file)), experts)
    return read.decoder(file, layer, router_loss=read.router_loss(file))


def read_exaone4(file: ConfigFile) -> DecoderConfig:
    """Full layers do not rotate if other layers slide."""
    file.set_defaults(sliding_window=4096, sliding_window_pattern=4, rms_norm_eps=1e-5)
    every = file.get("sliding_window_pattern")
    if isinstance(every, str):
        file.expect(sliding_window_pattern="L" * (len(every) - 1) + "G")
        every = len(every)
    windows = read.windows(file, lambda index: bool(every) and (index + 1) % every != 0)
    norm, rope = read.rms_norm(file), read.rope(file)
    attention = read.attention(file, None if file.get("sliding_window") else rope, query_key_norm=norm)
    layer = LayerConfig(attention, read.mlp(file), norm_before=False, norm_after=True)
    return read.decoder(file, read.with_windows(layer, windows, sliding_rope=rope))


def _olmo2_layer(file: ConfigFile, rope: RopeConfig) -> LayerConfig:
    return LayerConfig(_attention(file, rope), read.mlp(file), norm_before=False, norm_after=True)


def _attention(file: ConfigFile, rope: RopeConfig) -> AttentionConfig:
    norm = read.rms_norm(file)
    return read.attention(file, rope, bias_field="attention_bias", query_key_norm=norm, norm_all_heads=True)


register("olmo2", Family(read_olmo2, NAMES))
register("olmo3", Family(read_olmo3, NAMES))
register("olmoe", Family(read_olmoe, MOE_NAMES))
register("exaone4", Family(read_exaone4, NAMES))
