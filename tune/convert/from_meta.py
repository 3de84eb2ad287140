"""Convert Llama in Meta's own format (consolidated.NN.pth and params.json) to Hugging Face layout."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tune.checkpointers import load_torch_file, sound, write_tensors
from tune.errors import TuneError
from tune.files import exported
from tune.models import read_json

# Meta's name -> Hugging Face's, and the dimension along which model-parallel files split it (None: not split).
NAMES: dict[str, tuple[str, int | None]] = {
    "tok_embeddings": ("model.embed_tokens", 0),
    "layers.{}.attention_norm": ("model.layers.{}.input_layernorm", None),
    "layers.{}.attention.wq": ("model.layers.{}.self_attn.q_proj", 0),
    "layers.{}.attention.wk": ("model.layers.{}.self_attn.k_proj", 0),
    "layers.{}.attention.wv": ("model.layers.{}.self_attn.v_proj", 0),
    "layers.{}.attention.wo": ("model.layers.{}.self_attn.o_proj", 1),
    "layers.{}.ffn_norm": ("model.layers.{}.post_attention_layernorm", None),
    "layers.{}.feed_forward.w1": ("model.layers.{}.mlp.gate_proj", 0),
    "layers.{}.feed_forward.w3": ("model.layers.{}.mlp.up_proj", 0),
    "layers.{}.feed_forward.w2": ("model.layers.{}.mlp.down_proj", 1),
    "norm": ("model.norm", None),
    "output": ("lm_head", 0),
}
PARAMS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "use_scaled_rope", "max_seq_len", "max_batch_size", "model_parallel_size",
}  # fmt: skip


def import_meta(folder: Path, out: Path) -> list[str]:
    """Write the model in `folder` to `out`, with the same dtypes. `out` appears when it is complete.

    Returns notes for people to check: settings that params.json lacks and that were inferred.

    Raises:
        TuneError: files are missing or damaged, do not match, or are not from a Llama model.
    """
    params = _read_params(folder / "params.json")
    files = _files(folder)
    shards = [load_torch_file(file) for file in files]
    plan = {
        f"{theirs.format(layer)}.weight": (f"{ours.format(layer)}.weight", dimension)
        for theirs, (ours, dimension) in NAMES.items()
        for layer in range(params["n_layers"])
    }
    for file, shard in zip(files, shards, strict=True):
        if wrong := plan.keys() ^ {name for name in shard if not name.endswith("rope.freqs")}:
            listing = ", ".join(sorted(wrong)[:12])
            raise TuneError(f"{file} does not match {folder / 'params.json'}: only one of the two has {listing}")

    def whole(name: str) -> Tensor:
        pieces, dimension = [shard[name] for shard in shards], plan[name][1]
        if name == "tok_embeddings.weight" and pieces[0].shape[1] < params["dim"]:
            dimension = 1  # Llama 2 splits the width, Llama 3 the vocabulary
        return pieces[0] if dimension is None else torch.cat(pieces, dim=dimension)

    config, inferred = _config(params, whole)
    dim, heads = params["dim"], {"wq": params["n_heads"], "wk": config["num_key_value_heads"]}
    rows = {"wq": dim, "wk": dim // heads["wq"] * heads["wk"], "wv": dim // heads["wq"] * heads["wk"], "wo": dim}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, (ours, _) in plan.items():
            weight, kind = whole(name), name.split(".")[-2]
            if kind in rows and weight.shape != (rows[kind], dim):
                raise TuneError(
                    f"{folder}: {name} has shape {list(weight.shape)} in {len(shards)} files, but params.json implies "
                    f"{[rows[kind], dim]}. Check for missing files"
                )
            if ours != "lm_head.weight" or not config["tie_word_embeddings"]:
                yield ours, _halves(weight, heads[kind]) if kind in heads else weight.clone()

    with exported(out) as unfinished:
        write_tensors(unfinished, sound(tensors(), folder), len(plan))
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer = next((file for file in (folder, folder.parent) if (file / "tokenizer.model").is_file()), None)
        if tokenizer:
            shutil.copyfile(tokenizer / "tokenizer.model", unfinished / "tokenizer.model")
        else:
            inferred.append(f"no tokenizer.model in {folder}: copy the model's tokenizer files to {out}")
    return inferred


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("consolidated.*.pth"))
    expected = [folder / f"consolidated.{number:02d}.pth" for number in range(len(files))]
    if not files or files != expected:
        names = ", ".join(file.name for file in files) or "none"
        raise TuneError(f"{folder} must have consolidated.00.pth, consolidated.01.pth and so on; found {names}")
    return files


def _read_params(file: Path) -> dict[str, Any]:
    params = read_json(file, "tune convert")
    if unknown := {name: value for name, value in params.items() if name not in PARAMS and value is not None}:
        raise TuneError(
            f"{file}: not a Llama 1, 2 or 3 text model: {', '.join(unknown)}. Use the model in Hugging Face layout"
        )
    if missing := [name for name in ("dim", "n_layers", "n_heads", "norm_eps") if name not in params]:
        raise TuneError(f"{file} lacks {', '.join(missing)}")
    return params


def _config(params: dict[str, Any], whole: Callable[[str], Tensor]) -> tuple[dict[str, Any], list[str]]:
    embedding, head = whole("tok_embeddings.weight"), whole("output.weight")
    vocab_size = len(head)
    scaled, llama3 = bool(params.get("use_scaled_rope")), vocab_size == 128256
    tied = torch.equal(embedding, head)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.get("rope_theta", 10000.0)}
    if scaled:
        factor = 32.0 if tied else 8.0
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    if scaled:
        length = 131072
    elif llama3:
        length = 8192
    else:
        length = 16384 if rope["rope_theta"] > 10000 else 4096
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(head.dtype).removeprefix("torch."),
        "vocab_size": vocab_size,
        "hidden_size": params["dim"],
        "intermediate_size": len(whole("layers.0.feed_forward.w1.weight")),
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "max_position_embeddings": length,
        "rms_norm_eps": params["norm_eps"],
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000 if llama3 else 1,
        "eos_token_id": 128001 if llama3 else 2,
    }
    inferred = [f"max_position_embeddings={length}: inferred from vocabulary and rope, since params.json lacks it"]
    if scaled:
        version = "3.2, since the head is tied" if tied else "3.1, since the head is not tied"
        inferred.append(f"rope scaling factor {rope['factor']}: as in Llama {version}")
    return config, inferred


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rotated pairs: adjacent rows in Meta's format, the two halves of a head in Hugging Face's."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
