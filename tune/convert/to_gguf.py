"""Write a model with its tokenizer and chat template as a GGUF file for llama.cpp and Ollama."""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tune.checkpointers import Pretrained, full_tensors, with_progress
from tune.errors import TuneError
from tune.files import written_aside
from tune.lookup import needs
from tune.models import SCALINGS, Decoder, ExpertsConfig, RopeConfig
from tune.tokenizers import LLAMA3_WORDS, QWEN_WORDS, Tokenizer

LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Architecture:
    """A model family in llama.cpp."""

    name: str
    also: str = "an untied head, linear, yarn"  # the optional parts that it supports, see `PARTS`
    adjacent: bool = True  # rotates dimensions 2i and 2i + 1 of a head as a pair
    every: int = 0  # every n-th layer is special: no window, or no rotation in SmolLM3; 0: none
    activation: str = "silu"
    mlp_norm: str = "ffn_norm"  # its name for the norm before a feed-forward
    joined: bool = False  # gate and up are one tensor


ALL = "an untied head, linear, yarn, llama3, biases, output biases, feed-forward biases"
NORMALISED = "normalized experts"
AFTER = "post_attention_norm"
GEMMA: Any = {"adjacent": False, "activation": "gelu_tanh"}
ARCHITECTURES = {
    "llama": Architecture("llama", ALL),
    "mistral": Architecture("llama", ALL),
    "mixtral": Architecture("llama", f"{ALL}, {NORMALISED}"),
    "smollm3": Architecture("smollm3", "an untied head, linear, yarn, unrotated layers", every=4),
    "arcee": Architecture("arcee", activation="relu2"),
    "ernie4_5": Architecture("ernie4_5"),
    "ministral3": Architecture("mistral3"),
    "mistral3": Architecture("mistral3"),
    "granite": Architecture("granite", ALL),
    "granitemoe": Architecture("granitemoe", f"{ALL}, {NORMALISED}"),
    "granitemoehybrid": Architecture("granite", ALL),
    "cohere": Architecture("command-r", ""),
    "cohere2": Architecture("cohere2", "windows, unrotated layers", every=4),
    "qwen2": Architecture("qwen2", "an untied head, linear, yarn, biases", adjacent=False),
    "qwen2_moe": Architecture("qwen2moe", "an untied head, linear, yarn, biases", adjacent=False),
    "qwen3": Architecture("qwen3", adjacent=False),
    "qwen3_moe": Architecture("qwen3moe", f"an untied head, linear, yarn, {NORMALISED}", adjacent=False),
    "olmo2": Architecture("olmo2", adjacent=False),
    "olmo3": Architecture("olmo2", "an untied head, yarn, windows", adjacent=False, every=4),
    "olmoe": Architecture("olmoe", "an untied head, linear, yarn", adjacent=False),
    "exaone4": Architecture("exaone4", "an untied head, llama3, windows, unrotated layers", adjacent=False, every=4),
    "minimax_m2": Architecture("minimax-m2", f"an untied head, {NORMALISED}", adjacent=False),
    "seed_oss": Architecture("seed_oss", "an untied head, linear, yarn, biases", False, mlp_norm=AFTER),
    "glm": Architecture("chatglm", "an untied head, biases", joined=True),
    "glm4": Architecture("glm4", "an untied head, biases", joined=True),
    "glm4_moe": Architecture(
        "glm4moe", f"an untied head, biases, {NORMALISED}, layers without experts among others", False, mlp_norm=AFTER
    ),
    "gpt_oss": Architecture("gpt-oss", f"{ALL}, windows, {NORMALISED}", False, every=2, mlp_norm=AFTER),
    "phi3": Architecture("phi3", "an untied head, longrope", adjacent=False, joined=True),
    "starcoder2": Architecture("starcoder2", "an untied head, biases, output biases, feed-forward biases", **GEMMA),
    "gemma": Architecture("gemma", "", **GEMMA),
    "gemma2": Architecture("gemma2", "windows", every=2, **GEMMA),
    "gemma3": Architecture("gemma3", "windows, linear", every=6, **GEMMA),
    "gemma3_text": Architecture("gemma3", "windows, linear", every=6, **GEMMA),
}
# tune's module -> llama.cpp's tensor, or several tensors that are joined in tune.
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
    "mlp.shared_gate": "ffn_gate_inp_shexp", "mlp.router.correction": "exp_probs_b.bias",
    "attention.sinks": "attn_sinks.weight",
}  # fmt: skip

ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|\p{{N}}%s|{REST}"
CASED = CASED.replace(r"+[\r\n]*|", r"+[\r\n/]*|")
# (regular expression of words, whether whole words are looked up first) -> llama.cpp's name.
WORDS = {
    (LLAMA3_WORDS, True): "llama-bpe", (LLAMA3_WORDS, False): "dbrx", (QWEN_WORDS, False): "qwen2",
    (CASED % ("", "", ""), True): "tekken",
    (CASED % (f"{ENDINGS}?", f"{ENDINGS}?", "{1,3}"), False): "gpt-4o",
    ("ByteLevel", False): "gpt-2",
    ("Digits, ByteLevel", False): "smollm",
}  # fmt: skip


def export_gguf(
    model: Decoder, base: Pretrained | None, tokenizer: Tokenizer, file: Path, model_type: str, type: str = "f16"
) -> list[str]:
    """Write `model`, of the family `model_type`, with its tokenizer and chat template and weights as `type` (`f16`,
    `bf16`, `q8_0` or `q4_0`). Adapters are merged, frozen tensors are read from `base` if given, and memory holds one
    tensor at a time. `file` appears when it is complete. Returns notes on differences in llama.cpp's computation.

    Vectors and routers are stored in fp32. With `q4_0`, embedding and head are stored in `q8_0`. Quantized types need
    rows of a multiple of 32; other matrices are stored in fp16.

    Raises:
        TuneError: llama.cpp does not support the family or a part of this model; a weight is not finite, or too large
            for fp16.
    """
    with needs("hf", "GGUF"):
        import gguf
    architecture = architecture_of(model.config, model_type)
    factors = _frequency_factors(model.config)
    with written_aside(file) as unfinished:
        writer = gguf.GGUFWriter(unfinished, architecture.name)
        try:
            _add_shape(writer, model.config, architecture)
            writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{type.upper()}"])
            add_vocabulary(writer, tokenizer, model.config.vocab_size)
            for name, values in factors.items():
                writer.add_tensor_info(name, values.shape, "float32", values.nbytes, gguf.GGMLQuantizationType.F32)
            for name in model.names.on_disk:
                meta = operator.attrgetter(name)(model).detach().to("meta")
                for new, part in llama_cpp_tensors(name, meta, model.config, architecture):
                    kind = _kind(new, part, type)
                    size = math.prod(gguf.quants.quant_shape_to_byte_shape(part.shape, kind))
                    writer.add_tensor_info(new, part.shape, "float32", size, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for values in factors.values():
                writer.write_tensor_data(values.numpy())
            for name, full in with_progress(full_tensors(model, base), len(model.names.on_disk)):
                if not (largest := full.abs().max().item()) < math.inf:
                    raise TuneError(f"{name} has values that are not finite: training failed")
                for new, part in llama_cpp_tensors(name, full.float().cpu(), model.config, architecture):
                    kind = _kind(new, part, type)
                    if kind.name == "F16" and largest > LARGEST:
                        raise TuneError(f"{name} has values up to {largest:.3g}, too large for fp16: use bf16")
                    writer.write_tensor_data(gguf.quants.quantize(part.contiguous().numpy(), kind))
        finally:
            writer.close()
    lost = [tokenizer.decode([end]) for end in _other_ends(tokenizer)[2:]]
    ends = f"GGUF stores only three tokens that end an answer; answers will not stop at {' and '.join(lost)}"
    return [*_notes(model.config, architecture), *([ends] if lost else [])]


def metadata_of(config: Any, model_type: str) -> dict[str, Any]:
    """Return what `export_gguf` writes about a model with this `config`, by llama.cpp's names without the family's.

    Raises:
        TuneError: see `architecture_of`.
    """
    with needs("hf", "GGUF"):
        import gguf
    architecture = architecture_of(config, model_type)
    writer = gguf.GGUFWriter(None, architecture.name)
    _add_shape(writer, config, architecture)
    return {key.removeprefix(f"{architecture.name}."): value.value for key, value in writer.kv_data[0].items()}


def notes_of(config: Any, model_type: str) -> list[str]:
    """Return notes on differences between llama.cpp's computation and a model with this `config`."""
    architecture = ARCHITECTURES.get(model_type)
    return _notes(config, architecture) if architecture else []


def _add_shape(writer: Any, config: Any, architecture: Architecture) -> None:
    for key, value in _shape(config, architecture).items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)


def _frequency_factors(config: Any) -> dict[str, Tensor]:
    """Return llama.cpp's divisors of the rotation's frequencies, by tensor name."""
    rope = _ropes(config)[0]
    if not rope or rope.kind not in ("llama3", "longrope"):
        return {}
    ratios = SCALINGS["default"](rope)[0] / SCALINGS[rope.kind](rope)[0]
    names = ["rope_freqs"] if rope.kind == "llama3" else ["rope_factors_short", "rope_factors_long"]
    return {f"{name}.weight": ratio for name, ratio in zip(names, ratios.view(len(names), -1), strict=True)}


def _kind(name: str, tensor: Tensor, type: str) -> Any:
    """Return the type in which llama.cpp's tensor `name` is written."""
    import gguf

    kind = "Q8_0" if type == "q4_0" and not name.startswith("blk.") else type.upper()
    if tensor.ndim == 1 or "ffn_gate_inp" in name or name.endswith("bias"):
        kind = "F32"
    elif tensor.shape[-1] % 32 and kind.startswith("Q"):
        kind = "F16"
    return gguf.GGMLQuantizationType[kind]


def _notes(config: Any, architecture: Architecture) -> list[str]:
    """Return notes on differences between llama.cpp's computation and this model."""
    rope, notes = _ropes(config)[0], []
    windows = [layer.attention.window for layer in config.layers if layer.attention.window]
    if windows and "windows" not in architecture.also:
        notes.append(f"llama.cpp has no sliding window for this family: results differ beyond {windows[0]} tokens")
    if rope and rope.kind == "longrope":
        notes.append("llama.cpp uses the factors for long texts whenever its context (-c) exceeds the original length")
    if rope and rope.scaling.get("truncate") is False:
        notes.append("llama.cpp rounds the bounds of YaRN's ramp, unlike this model: results differ slightly")
    return notes


# Optional parts of models, by the names in `Architecture.also` -> whether a model with this config has the part.
PARTS: dict[str, Callable[[Any], bool]] = {
    "a score head": lambda config: config.scores,
    "an untied head": lambda config: not config.tied_head,
    "biases": lambda config: any(part.bias for part in _attentions(config)),
    "output biases": lambda config: any(part.output_bias for part in _attentions(config)),
    "feed-forward biases": lambda config: any(getattr(layer.mlp, "bias", False) for layer in config.layers),
    "this clamp of experts": lambda config: any(
        getattr(layer.mlp, "clamp", None) not in (None, (1.702, 7.0)) for layer in config.layers
    ),
    "unrotated layers": lambda config: any(part.rope is None for part in _attentions(config)),
    NORMALISED: lambda config: any(router.normalized for router in _routers(config)),
    "layers without experts among others": lambda config: len({type(layer.mlp) for layer in config.layers}) > 1,
    "groups of experts": lambda config: any(router.num_groups > 1 for router in _routers(config)),
    "other bounds of YaRN (beta_fast, beta_slow)": lambda config: any(
        (rope.scaling.get("beta_fast") or 32, rope.scaling.get("beta_slow") or 1) != (32, 1)
        for rope in _ropes(config)
        if rope
    ),
}


def architecture_of(config: Any, model_type: str) -> Architecture:
    """Return the family in llama.cpp. Raises TuneError if llama.cpp does not support the family or a part of this
    model."""
    converter = "try llama.cpp's own converter: `python convert_hf_to_gguf.py FOLDER` (a folder in Hugging Face layout)"
    if model_type not in ARCHITECTURES:
        families = ", ".join(ARCHITECTURES)
        raise TuneError(f"GGUF: '{model_type}' models are not supported, only {families}; {converter}")
    architecture = ARCHITECTURES[model_type]
    needed = [name for name, is_in in PARTS.items() if is_in(config)]
    needed += [rope.kind for rope in _ropes(config) if rope and rope.kind != "default"]
    missing = [name for name in needed if name not in architecture.also.split(", ")]
    missing += _unlike_the_family(config, model_type, architecture)
    if missing:
        raise TuneError(f"GGUF: llama.cpp's {architecture.name} does not support {', '.join(missing)}; {converter}")
    return architecture


def _unlike_the_family(config: Any, model_type: str, architecture: Architecture) -> Iterator[str]:
    """Yield properties of this model that differ from what llama.cpp assumes for the whole family."""
    layers, parts = config.layers, _attentions(config)
    first = parts[0]
    if model_type in ("starcoder2", "gpt_oss") and not first.bias:
        yield "layers without biases"
    if NORMALISED in architecture.also and any(not router.normalized for router in _routers(config)):
        yield "experts that are not normalized"
    if model_type == "olmoe" and first.num_kv_heads != first.num_heads:
        yield "grouped-query attention"
    if model_type == "exaone4" and first.head_dim * first.num_heads != config.hidden_size:
        yield "heads of this size"
    special = [part.rope is None if model_type == "smollm3" else not part.window for part in parts]
    without_windows = model_type == "exaone4" and all(special)
    in_turn = [(number + 1) % architecture.every == 0 for number in range(len(layers))] if architecture.every else []
    if architecture.every and special != in_turn and not without_windows:
        yield "this order of layers"
    if model_type == "exaone4" and without_windows == (len(layers) == 64):
        yield "this combination of windows and number of layers"
    if layers[0].mlp.activation != architecture.activation:
        yield f"the activation {layers[0].mlp.activation}"
    has_own_scale = any(part.scale not in (None, part.head_dim**-0.5) for part in parts)
    if has_own_scale and not architecture.name.startswith("granite"):
        yield "this scale of attention"


def _attentions(config: Any) -> list[Any]:
    return [layer.attention for layer in config.layers]


def _routers(config: Any) -> list[Any]:
    return [layer.mlp.router for layer in config.layers if isinstance(layer.mlp, ExpertsConfig)]


def llama_cpp_tensors(
    name: str, tensor: Tensor, config: Any, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of llama.cpp's tensors for tune's tensor `name`."""
    owner, _, kind = name.rpartition(".")
    _, number, module = [*owner.split(".", 2), "", ""][:3] if owner.startswith("blocks.") else ("", "", owner)
    if special := NAMES.get(f"{module}.{kind}"):
        yield f"blk.{number}.{special}", tensor
        return
    attention = config.layers[0].attention
    heads = {"attention.query": attention.num_heads, "attention.key": attention.num_kv_heads}.get(module)
    if heads and architecture.adjacent and attention.rope and not attention.rope.interleaved:
        tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if config.norm.kind == "rms_offset" and module.endswith("norm"):
        tensor = tensor + 1
    elif module == "mlp.shared_gate":
        tensor = tensor[0]
    experts = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertsConfig)), None)
    if experts and experts.transposed and "experts" in module:
        tensor = tensor.transpose(-2, -1) if kind == "weight" else tensor
    names = architecture.mlp_norm if module == "mlp_norm" else NAMES[module]
    new = names.split()[-1 if architecture.joined else 0 :]
    parts = tensor.chunk(len(new), dim=-2) if len(new) > 1 else [tensor]
    if experts and experts.fused == "interleaved" and len(new) > 1:
        parts = [tensor[:, 0::2], tensor[:, 1::2]]
    for each, part in zip(new, parts, strict=True):
        yield f"blk.{number}.{each}.{kind}" if number else f"{each}.{kind}", part


def _ropes(config: Any) -> tuple[RopeConfig | None, RopeConfig | None]:
    """Return the rotation of layers without a window (of all layers, if these have none), and with a window."""
    rotated = [layer.attention for layer in config.layers if layer.attention.rope]
    rotated.sort(key=lambda attention: bool(attention.window))
    return (rotated[0].rope, rotated[-1].rope if rotated[-1].window else None) if rotated else (None, None)


def _shape(config: Any, architecture: Architecture) -> dict[str, Any]:
    """Return keys of gguf's writer and their values for the model; None is omitted."""
    import gguf

    layer, (rope, sliding) = config.layers[0], _ropes(config)
    attention, experts = layer.attention, [each.mlp for each in config.layers if isinstance(each.mlp, ExpertsConfig)]
    mlp, router = (experts[0], experts[0].router) if experts else (layer.mlp, None)
    window = next((each.attention.window for each in config.layers if each.attention.window), 0)
    if "windows" not in architecture.also:
        window = 0 if architecture.name == "phi3" else None
    shape = {
        "block_count": len(config.layers), "embedding_length": config.hidden_size, "vocab_size": config.vocab_size,
        "head_count": attention.num_heads, "head_count_kv": attention.num_kv_heads,
        "key_length": attention.head_dim, "value_length": attention.head_dim, "feed_forward_length": layer.mlp.size,
        "layer_norm_eps" if config.norm.kind == "layer" else "layer_norm_rms_eps": config.norm.eps,
        "expert_count": router and router.num_experts, "expert_used_count": router and router.chosen,
        "expert_feed_forward_length": router and mlp.size, "expert_shared_feed_forward_length": router and mlp.shared,
        "sliding_window": window,
        "rope_freq_base_swa": sliding and sliding.theta,
        "attn_logit_softcapping": attention.softcap, "final_logit_softcapping": config.logit_softcap,
        "logit_scale": None if config.logit_scale == 1 else config.logit_scale,
    }  # fmt: skip
    if architecture.name.startswith("granite"):
        shape |= {
            "attention_scale": attention.scale, "embedding_scale": config.embedding_multiplier,
            "residual_scale": layer.residual_multiplier, "logit_scale": 1 / config.logit_scale,
        }  # fmt: skip
    if router and router.correction:
        shape |= {
            "leading_dense_block_count": len(config.layers) - len(experts), "expert_weights_scale": router.scale,
            "expert_weights_norm": router.normalized, "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
            "expert_shared_count": mlp.shared // mlp.size if mlp.shared else None,
        }  # fmt: skip
    if rope is None:
        return shape
    original = rope.scaling.get("original_max_position_embeddings", rope.max_positions)
    factor, magnitude = rope.scaling.get("factor") or rope.max_positions / original, SCALINGS[rope.kind](rope)[1]
    shape |= {
        "context_length": rope.max_positions, "rope_dimension_count": rope.size, "rope_freq_base": rope.theta,
        "rope_scaling_orig_ctx_len": original,
        "rope_scaling_attn_factors": magnitude / (0.1 * math.log(factor) + 1 if rope.kind == "yarn" else 1),
    }  # fmt: skip
    if rope.query_growth:
        shape |= {"attn_temperature_scale": rope.query_growth, "attn_temperature_length": original}
    if rope.kind in ("linear", "yarn"):
        kind = gguf.RopeScalingType[rope.kind.upper()]
        shape |= {"rope_scaling_type": kind, "rope_scaling_factor": factor}
    return shape


def add_vocabulary(writer: Any, tokenizer: Tokenizer, rows: int) -> None:
    """Add the `tokenizer` of a model whose embedding has `rows` rows. Raises TuneError if llama.cpp does not support
    it."""
    from gguf import TokenType

    definition = tokenizer.definition
    model, ids = definition["model"], tokenizer.vocabulary
    if model["type"] != "BPE":
        raise TuneError(f"GGUF: the tokenizer in {tokenizer.path} is a {model['type']}; only BPE is converted")
    # llama.cpp's converter refuses these, too: a file whose embedding lacks a token's row cannot be loaded.
    if beyond := sorted((index, token) for token, index in ids.items() if index >= rows):
        index, token = beyond[0]
        raise TuneError(
            f"GGUF: the tokenizer in {tokenizer.path} has {len(beyond)} tokens without a row in the model's embedding: "
            f"the first is {token!r} with id {index}, and the embedding has {rows} rows. Use the tokenizer and the "
            "model of the same checkpoint"
        )
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    tokens = [f"[PAD{index}]" for index in range(rows)]
    types = [TokenType.UNUSED] * rows
    for token, index in ids.items():
        tokens[index], types[index] = token, TokenType.NORMAL
    for added in definition["added_tokens"]:
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if model.get("byte_fallback"):  # sentencepiece merges the pair with the highest score first
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault(pair.replace(" ", ""), rank)
        for index, token in enumerate(tokens):
            if len(token) == 6 and token.startswith("<0x"):
                types[index] = TokenType.BYTE
            elif token == model["unk_token"]:
                types[index] = TokenType.UNKNOWN
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
        outer, normalizer = definition["pre_tokenizer"] or {}, definition["normalizer"] or {}
        steps = [*outer.get("pretokenizers", [outer]), *normalizer.get("normalizers", [normalizer])]
        prepends = any(step.get("prepend") or step.get("prepend_scheme") in ("first", "always") for step in steps)
        writer.add_add_space_prefix(prepends)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_words(definition, tokenizer))
        writer.add_token_merges(merges)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name in ("bos", "eos", "pad", "unk"):
        if (special := tokenizer.special_tokens.get(f"{name}_token", "")) in ids:
            getattr(writer, f"add_{name}_token_id")(ids[special])
    for add, end in zip((writer.add_eot_token_id, writer.add_eom_token_id), _other_ends(tokenizer), strict=False):
        add(end)
    writer.add_add_bos_token(bool(tokenizer.prefix_ids))
    writer.add_add_eos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _other_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end an answer, except EOS."""
    return sorted(tokenizer.stop_ids - {tokenizer.eos_id})


def _words(definition: dict[str, Any], tokenizer: Tokenizer) -> str:
    """Return llama.cpp's name for the tokenizer's rule that splits text into words."""
    outer = definition["pre_tokenizer"] or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("pattern", {}).get("Regex") or step.get("type", "none") for step in steps]
    is_split = len(steps) == 2 and steps[0]["type"] == "Split" and steps[0]["behavior"] == "Isolated"
    plain = is_split and not steps[1].get("use_regex") and not steps[0]["invert"]
    rule = kinds[0] if plain else ", ".join(kinds)
    normalizer = (definition["normalizer"] or {}).get("type")
    name = WORDS.get((rule, bool(definition["model"].get("ignore_merges"))))
    if name is None or steps[-1].get("add_prefix_space") or normalizer not in (None, "NFC"):
        raise TuneError(
            f"GGUF: unknown word-splitting rule of {tokenizer.path}'s tokenizer: {rule}. Try llama.cpp's own "
            "converter: `python convert_hf_to_gguf.py FOLDER`"
        )
    return name
