"""Phi-3, Phi-3.5 and Phi-4: fused projections, LongRoPE, a part of each head rotated."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES as LLAMA_NAMES

NAMES = LLAMA_NAMES | {
    "model.layers.{}.self_attn.qkv_proj": "blocks.{}.attention.query_key_value",
    "model.layers.{}.mlp.gate_up_proj": "blocks.{}.mlp.gate_up",
}


def read_phi3(file: ConfigFile) -> DecoderConfig:
    file.set_defaults(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5)
    file.expect(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)
    file.without_dropout("resid_pdrop", "embd_pdrop")
    scaling = read.rope_fields(file)
    if "short_factor" in scaling:  # called su, and yarn, before it was called longrope
        scaling |= {"rope_type": "longrope"}
    attention = read.attention(file, read.rope(file, partial=True, fields=scaling), fused=True)
    layer = LayerConfig(attention, read.mlp(file, fused=True))
    return read.decoder(file, read.with_windows(layer, read.windows(file)))


register("phi3", Family(read_phi3, NAMES))
