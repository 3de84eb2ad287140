"""Writing a model as a GGUF file, which llama.cpp, Ollama and LM Studio load."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tune.atomic import written_aside
from tune.checkpointers.gguf_vocabulary import add_vocabulary
from tune.checkpointers.hf_tensors import full_tensors
from tune.checkpointers.weights import Pretrained
from tune.errors import TuneError
from tune.models import Decoder, DecoderConfig
from tune.models.layers import MLPConfig
from tune.models.moe import ExpertsConfig
from tune.models.rope import SCALINGS, RopeConfig
from tune.tokenizers import Tokenizer

TYPES = ("f16", "bf16", "q8_0", "q4_0")


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's name of a family; whether it rotates dimensions 2i and 2i + 1 of a head as a pair (`neighbours`);
    which layers have no window; and of what not all models of the family have, what it computes (`also`)."""

    name: str
    also: str = "untied, linear, yarn"
    neighbours: bool = False
    activation: str = "silu"
    every: int = 0


LLAMA = "untied, linear, yarn, llama3, biases, feed-forward biases"
ARCHITECTURES = {
    "llama": Architecture("llama", LLAMA, neighbours=True),
    "mistral": Architecture("llama", LLAMA, neighbours=True),
    "mixtral": Architecture("llama", LLAMA + ", normalised experts", neighbours=True),
    "smollm3": Architecture("smollm3", "untied, linear, yarn, unrotated layers", neighbours=True, every=4),
    "arcee": Architecture("arcee", neighbours=True, activation="relu2"),
    "granite": Architecture("granite", LLAMA, neighbours=True),
    "granitemoe": Architecture("granitemoe", LLAMA + ", normalised experts", neighbours=True),
    "granitemoehybrid": Architecture("granite", LLAMA, neighbours=True),
    "ernie4_5": Architecture("ernie4_5", neighbours=True),
    "cohere": Architecture("command-r", "", neighbours=True),
    "cohere2": Architecture("cohere2", "windows, unrotated layers", neighbours=True, every=4),
    "qwen2": Architecture("qwen2", "untied, linear, yarn, biases"),
    "qwen2_moe": Architecture("qwen2moe", "untied, linear, yarn, biases"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe", "untied, linear, yarn, normalised experts"),
    "gemma": Architecture("gemma", "", activation="gelu_tanh"),
    "gemma2": Architecture("gemma2", "windows", activation="gelu_tanh", every=2),
    "gemma3": Architecture("gemma3", "windows, linear", activation="gelu_tanh", every=6),
    "gemma3_text": Architecture("gemma3", "windows, linear", activation="gelu_tanh", every=6),
    "phi3": Architecture("phi3", "untied, longrope"),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe"),
    "starcoder2": Architecture("starcoder2", "untied, biases, feed-forward biases", activation="gelu_tanh"),
}
# Our module -> llama.cpp's tensor, or those whose rows follow each other in ours.
NAMES = {
    "embedding": "token_embd", "norm": "output_norm", "head": "output",
    "attention_norm": "attn_norm", "attention_output_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm", "mlp_output_norm": "post_ffw_norm",
    "attention.query": "attn_q", "attention.key": "attn_k", "attention.value": "attn_v",
    "attention.query_key_value": "attn_qkv", "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm", "attention.key_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.gate_up": "ffn_gate ffn_up", "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp", "mlp.experts.gate": "ffn_gate_exps", "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.gate_up": "ffn_gate_exps ffn_up_exps", "mlp.experts.down": "ffn_down_exps",
    "mlp.shared.gate": "ffn_gate_shexp", "mlp.shared.up": "ffn_up_shexp", "mlp.shared.down": "ffn_down_shexp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


def export_gguf(
    model: Decoder, base: Pretrained | None, tokenizer: Tokenizer, file: Path, model_type: str, type: str = "f16"
) -> list[str]:
    """Write `model`, of the family `model_type`, with its tokenizer and chat template, as one of `TYPES`. Frozen tensors
    are read from `base`, if given, and adapters merged; one tensor at a time is in memory. `file` appears when it is
    complete. Vectors and routers are in fp32; with `q4_0` embedding and head are in `q8_0`; a matrix whose rows are no
    multiple of 32 is in fp16. Returns notes on what llama.cpp computes otherwise.

    Raises:
        TuneError: llama.cpp has no such family, or computes something of this model otherwise; a weight that is not
            finite, or too large for fp16.
    """
    gguf = gguf_package()
    architecture = require_supported(model.config, model_type)
    source = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in model.names.on_disk}
    rope = _ropes(model.config)[0]
    with written_aside(file) as unfinished:
        writer = gguf.GGUFWriter(unfinished, architecture.name)
        try:
            _add_shape(writer, model.config, architecture)
            writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{type.upper()}"])
            add_vocabulary(writer, tokenizer, model.config.vocab_size)
            factors = _rope_factors(rope) if rope else {}

            def plan(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor, Any]]:
                for new, part in parts(name, tensor, model.config, architecture):
                    yield new, part, gguf.GGMLQuantizationType[_type(new, part, type.upper())]

            for name, values in factors.items():
                writer.add_tensor_info(name, values.shape, "float32", values.nbytes, gguf.GGMLQuantizationType.F32)
            for name, (owner, kind) in source.items():
                for new, part, stored in plan(name, getattr(owner, kind).detach().to("meta")):
                    size = math.prod(gguf.quants.quant_shape_to_byte_shape(part.shape, stored))
                    writer.add_tensor_info(new, part.shape, "float32", size, stored)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for values in factors.values():
                writer.write_tensor_data(values.numpy())
            for name, full in full_tensors(model, base):
                largest = full.abs().max().item()
                if not math.isfinite(largest):
                    raise TuneError(f"{name} has values that are not finite: the training failed")
                for _, part, stored in plan(name, full.float().cpu()):
                    if stored.name == "F16" and largest > torch.finfo(torch.float16).max:
                        raise TuneError(f"{name} has values up to {largest:.3g}, which fp16 cannot hold: take bf16")
                    writer.write_tensor_data(gguf.quants.quantize(part.contiguous().numpy(), stored))
        finally:
            writer.close()
    windows = {layer.attention.window for layer in model.config.layers if layer.attention.window}
    if windows and not architecture.every:
        return [f"llama.cpp has no sliding window in this family: texts of more than {min(windows)} tokens differ"]
    return []


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise TuneError(f"GGUF files need the hf extra ({error}): pip install 'tune-recipes[hf]'") from error
    return gguf


def require_supported(config: DecoderConfig, model_type: str) -> Architecture:
    """How llama.cpp calls the family. Raises TuneError if it has none such, or not all that this model needs."""
    converter = "`python convert_hf_to_gguf.py FOLDER` of llama.cpp may, from the folder in Hugging Face layout"
    if (found := ARCHITECTURES.get(model_type)) is None:
        raise TuneError(
            f"GGUF: the family '{model_type}' is not converted here, but {', '.join(ARCHITECTURES)}. {converter}"
        )
    if config.scores:
        raise TuneError("GGUF: reward models are not converted")
    layers, attentions = config.layers, [layer.attention for layer in config.layers]
    kinds = {rope.kind for rope in _ropes(config) if rope} - {"default"}
    full = [not attention.window for attention in attentions]
    experts = [layer.mlp.router for layer in layers if isinstance(layer.mlp, ExpertsConfig)]
    activations = {layer.mlp.activation for layer in layers if isinstance(layer.mlp, MLPConfig | ExpertsConfig)}
    needed = {
        "untied": not config.tied_head,
        "biases": any(attention.bias for attention in attentions) and model_type != "qwen2",
        "feed-forward biases": any(getattr(layer.mlp, "bias", False) for layer in layers),
        "unrotated layers": any(attention.rope is None for attention in attentions),
        "windows": not all(full) and found.name in ("cohere2", "gemma2", "gemma3", "smollm3"),
        "normalised experts": any(router.normalized for router in experts),
        **dict.fromkeys(kinds, True),
    }
    lacking = [what for what, is_needed in needed.items() if is_needed and what not in found.also.split(", ")]
    if "normalised experts" in found.also and not all(router.normalized for router in experts):
        lacking.append("experts whose weights are not normalised")
    special = [attention.rope is None for attention in attentions] if model_type == "smollm3" else full
    if found.every and special != [(index + 1) % found.every == 0 for index in range(len(full))]:
        lacking.append(f"layers in another order than one without a window or rotation after each {found.every - 1}")
    if model_type == "starcoder2" and not attentions[0].bias:
        lacking.append("layers without biases")
    if model_type == "olmoe" and attentions[0].num_kv_heads < attentions[0].num_heads:
        lacking.append("keys that queries share")
    if 0 < len(experts) < len(layers):
        lacking.append("layers without experts among those with")
    if activations != {found.activation}:
        lacking.append(f"the activation {', '.join(activations)}")
    if not found.name.startswith("granite") and any((each.scale or each.head_dim**-0.5) != each.head_dim**-0.5 for each in attentions):
        lacking.append("a scale of scores that is not that of the heads' size")
    if lacking:
        raise TuneError(f"GGUF: llama.cpp's {found.name} does not compute {' and '.join(lacking)}. {converter}")
    return found


def parts(
    name: str, tensor: Tensor, config: DecoderConfig, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Our tensor `name` as llama.cpp's: name and values of each."""
    owner, _, kind = name.rpartition(".")
    words = owner.split(".")
    prefix = f"blk.{words[1]}." if words[0] == "blocks" else ""
    module = ".".join(words[2:]) if prefix else owner
    attention = config.layers[0].attention
    heads = {"attention.query": attention.num_heads, "attention.key": attention.num_kv_heads}.get(module)
    if heads and architecture.neighbours and attention.rope and not attention.rope.interleaved:
        tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if config.norm.kind == "rms_offset" and module.endswith("norm"):
        tensor = tensor + 1
    new = NAMES[module].split()
    if architecture.name == "phi3":
        new = new[-1:]
    if module == "mlp.shared_gate":
        tensor = tensor[0]
    for each, part in zip(new, tensor.chunk(len(new), dim=-2) if len(new) > 1 else [tensor], strict=True):
        yield f"{prefix}{each}.{kind}", part


def _type(name: str, part: Tensor, type: str) -> str:
    if part.ndim == 1 or "ffn_gate_inp" in name:
        return "F32"
    if type in ("Q8_0", "Q4_0") and part.shape[-1] % 32:
        return "F16"
    return "Q8_0" if type == "Q4_0" and name in ("token_embd.weight", "output.weight") else type


def _ropes(config: DecoderConfig) -> list[RopeConfig | None]:
    """The rotation of layers without a window, and of those with one."""
    with_rope = [layer.attention for layer in config.layers if layer.attention.rope]
    full = [each.rope for each in with_rope if not each.window]
    sliding = [each.rope for each in with_rope if each.window]
    return [next(iter(full or sliding), None), next(iter(sliding), None)]


def _rope_factors(rope: RopeConfig) -> dict[str, Tensor]:
    """What llama.cpp divides the frequencies by, where it is told so by a tensor."""
    if rope.kind not in ("llama3", "longrope"):
        return {}
    plain = SCALINGS["default"](rope)[0]
    factors = plain / SCALINGS[rope.kind](rope)[0]
    if rope.kind == "llama3":
        return {"rope_freqs.weight": factors}
    return {"rope_factors_short.weight": factors[0].clone(), "rope_factors_long.weight": factors[1].clone()}


def _add_shape(writer: Any, config: DecoderConfig, architecture: Architecture) -> None:
    import gguf

    layer, (rope, sliding) = config.layers[0], _ropes(config)
    attention, mlp, name = layer.attention, layer.mlp, architecture.name
    writer.add_block_count(len(config.layers))
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_feed_forward_length(mlp.size)
    (writer.add_layer_norm_eps if config.norm.kind == "layer" else writer.add_layer_norm_rms_eps)(config.norm.eps)
    if isinstance(mlp, ExpertsConfig):
        writer.add_expert_count(mlp.router.num_experts)
        writer.add_expert_used_count(mlp.router.chosen)
        writer.add_expert_feed_forward_length(mlp.size)
        if mlp.shared:
            writer.add_expert_shared_feed_forward_length(mlp.shared)
    if rope:
        writer.add_context_length(rope.max_positions)
        writer.add_rope_dimension_count(rope.size)
        writer.add_rope_freq_base(rope.theta)
        if rope.kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType[rope.kind.upper()])
            original = rope.scaling.get("original_max_position_embeddings", rope.max_positions)
            writer.add_rope_scaling_factor(rope.scaling.get("factor") or rope.max_positions / original)
            writer.add_rope_scaling_orig_ctx_len(original)
        if rope.kind == "yarn":
            usual = 0.1 * math.log(rope.scaling.get("factor") or rope.max_positions / original) + 1
            writer.add_rope_scaling_attn_factors(SCALINGS["yarn"](rope)[1] / usual)
        if rope.kind == "longrope":
            writer.add_rope_scaling_orig_ctx_len(rope.scaling["original_max_position_embeddings"])
            writer.add_rope_scaling_attn_factors(SCALINGS["longrope"](rope)[1])
    if sliding and architecture.every:
        writer.add_sliding_window(next(each.attention.window for each in config.layers if each.attention.window))
        writer.add_rope_freq_base_swa(sliding.theta)
    elif name == "phi3":
        writer.add_sliding_window(0)
    if attention.softcap:
        writer.add_attn_logit_softcapping(attention.softcap)
    if config.logit_softcap:
        writer.add_final_logit_softcapping(config.logit_softcap)
    if name.startswith("granite"):
        writer.add_attention_scale(attention.scale or attention.head_dim**-0.5)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(layer.residual_multiplier)
        writer.add_logit_scale(1 / config.logit_scale)
    elif config.logit_scale != 1:
        writer.add_logit_scale(config.logit_scale)
