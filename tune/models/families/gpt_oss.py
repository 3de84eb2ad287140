"""gpt-oss: attention sinks, a window in every other layer, and experts with biases and a clamped gate."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read, register
from tune.models.families.llama import NAMES as LLAMA_NAMES

NAMES = LLAMA_NAMES | {
    "model.layers.{}.self_attn.sinks": "blocks.{}.attention.sinks",
    "model.layers.{}.mlp.router": "blocks.{}.mlp.router",
    "model.layers.{}.mlp.experts.gate_up_proj": "blocks.{}.mlp.experts.gate_up.weight",
    "model.layers.{}.mlp.experts.gate_up_proj_bias": "blocks.{}.mlp.experts.gate_up.bias",
    "model.layers.{}.mlp.experts.down_proj": "blocks.{}.mlp.experts.down.weight",
    "model.layers.{}.mlp.experts.down_proj_bias": "blocks.{}.mlp.experts.down.bias",
}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_gpt_oss(file: ConfigFile) -> DecoderConfig:
    file.set_defaults(
        head_dim=64, max_position_embeddings=131072, sliding_window=128, rope_theta=150000.0, rms_norm_eps=1e-5,
        num_experts_per_tok=4, attention_bias=True,
    )  # fmt: skip
    file.ignore("experts_per_token", "initial_context_length")  # copies of other fields
    rope = read.rope(file, fields=read.rope_fields(file) or YARN)
    attention = read.attention(file, rope, bias_field="attention_bias", sinks=True)
    experts = read.experts(
        file, read.num_experts(file, 128), "intermediate_size", router={"scores": "softmax_of_chosen", "bias": True},
        fused="interleaved", bias=True, transposed=True,
        clamp=(file.number("swiglu_alpha", 1.702), file.number("swiglu_limit", 7.0)),
    )  # fmt: skip
    layers = read.with_windows(LayerConfig(attention, experts), read.windows(file, lambda number: number % 2 == 0))
    return read.decoder(file, layers, router_loss=read.router_loss(file))


register("gpt_oss", Family(read_gpt_oss, NAMES))
