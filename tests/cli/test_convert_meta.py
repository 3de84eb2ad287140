"""Llama in Meta's format: transformers computes from the converted folder what Meta's formulas compute."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.cli import main

transformers = pytest.importorskip("transformers")

LLAMA2 = {"dim": 32, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5, "vocab_size": -1, "multiple_of": 16}
LLAMA3 = LLAMA2 | {"n_kv_heads": 2, "vocab_size": 90, "rope_theta": 5e5}
# The dimension along which Meta's files split a weight.
COLUMNS, ROWS = ("wq", "wk", "wv", "w1", "w3", "output"), ("wo", "w2")
TOKENS = torch.arange(24)[None]


def tensors_of(params):
    torch.manual_seed(0)
    dim, inner = params["dim"], 48
    kv_dim = dim * params.get("n_kv_heads", params["n_heads"]) // params["n_heads"]
    shapes = {"attention.wq": (dim, dim), "attention.wk": (kv_dim, dim), "attention.wv": (kv_dim, dim)}
    shapes |= {"attention.wo": (dim, dim), "feed_forward.w1": (inner, dim), "feed_forward.w3": (inner, dim)}
    shapes |= {"feed_forward.w2": (dim, inner), "attention_norm": (dim,), "ffn_norm": (dim,)}
    names = {f"layers.{layer}.{name}": shape for layer in range(params["n_layers"]) for name, shape in shapes.items()}
    names |= {"tok_embeddings": (90, dim), "norm": (dim,), "output": (90, dim)}
    tensors = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in names.items()}
    return tensors | {"rope.freqs": 1 / 10000 ** (torch.arange(0, 8, 2) / 8)}


def save(folder, params, tensors, count=1, embedding_dimension=0):
    """Save `count` files, split like fairscale's parallel layers."""
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "tokenizer.model").write_bytes(b"the tokenizer")
    for number in range(count):
        part = {}
        for name, tensor in tensors.items():
            kind = name.split(".")[-2]
            dimension = 0 if kind in COLUMNS else 1 if kind in ROWS else None
            if kind == "tok_embeddings":
                dimension = embedding_dimension
            part[name] = tensor if dimension is None else tensor.chunk(count, dim=dimension)[number].clone()
        torch.save(part, folder / f"consolidated.{number:02d}.pth")
    return folder


def reference(params, tensors, tokens):
    """Return logits by the formulas of Meta's reference implementation: adjacent pairs rotated as complex numbers."""

    def norm(hidden, name):
        return hidden * (hidden.pow(2).mean(-1, keepdim=True) + params["norm_eps"]).rsqrt() * tensors[f"{name}.weight"]

    def linear(hidden, name):
        return hidden @ tensors[f"{name}.weight"].T

    def rotated(heads):
        size = heads.shape[-1]
        frequencies = 1 / params.get("rope_theta", 10000.0) ** (torch.arange(0, size, 2).float() / size)
        turns = torch.polar(torch.ones(1), torch.outer(torch.arange(heads.shape[1]).float(), frequencies))
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)

    hidden = tensors["tok_embeddings.weight"][tokens]
    for layer in range(params["n_layers"]):
        name, head_dim = f"layers.{layer}", params["dim"] // params["n_heads"]
        normed = norm(hidden, f"{name}.attention_norm")
        query, key, value = (
            linear(normed, f"{name}.attention.{kind}").unflatten(-1, (-1, head_dim)) for kind in ("wq", "wk", "wv")
        )
        groups = query.shape[2] // key.shape[2]
        key, value = (heads.repeat_interleave(groups, dim=2).transpose(1, 2) for heads in (rotated(key), value))
        scores = rotated(query).transpose(1, 2) @ key.transpose(2, 3) / head_dim**0.5
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        hidden = hidden + linear((scores.softmax(-1) @ value).transpose(1, 2).flatten(2), f"{name}.attention.wo")
        normed = norm(hidden, f"{name}.ffn_norm")
        gated = F.silu(linear(normed, f"{name}.feed_forward.w1")) * linear(normed, f"{name}.feed_forward.w3")
        hidden = hidden + linear(gated, f"{name}.feed_forward.w2")
    return linear(norm(hidden, "norm"), "output")


@pytest.mark.parametrize(
    ("params", "count", "embedding_dimension"), [(LLAMA2, 1, 0), (LLAMA2, 2, 1), (LLAMA3, 1, 0), (LLAMA3, 2, 0)]
)
def test_logits_match_metas_formulas(tmp_path, params, count, embedding_dimension):
    tensors = tensors_of(params)
    save(tmp_path / "meta", params, tensors, count, embedding_dimension)
    main(["convert", str(tmp_path / "meta"), str(tmp_path / "out")])
    expected = reference(params, tensors, TOKENS)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert_close(theirs(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)
        assert_close(load_model(str(tmp_path / "out"))(TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"the tokenizer"


@pytest.mark.parametrize(("tied", "factor"), [(False, 8.0), (True, 32.0)])
def test_scaled_rope_and_dtypes(tmp_path, capsys, tied, factor):
    """Llama 3.1, and Llama 3.2 with tied embeddings."""
    params = LLAMA3 | {"use_scaled_rope": True}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(params).items()}
    if tied:
        tensors["output.weight"] = tensors["tok_embeddings.weight"]
    save(tmp_path / "meta", params, tensors)
    main(["convert", str(tmp_path / "meta"), str(tmp_path / "out")])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == factor and config["tie_word_embeddings"] == tied
    assert config["max_position_embeddings"] == 131072 and config["dtype"] == "bfloat16"
    assert f"note: rope scaling factor {factor}" in capsys.readouterr().out
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in written) != tied


def fails(folder: Path, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(folder), str(folder.parent / "out")])
    assert stopped.value.code == 2 and not (folder.parent / "out").exists()
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "consolidated.00.pth").unlink(), "found consolidated.01.pth"),
        (lambda folder: (folder / "consolidated.01.pth").unlink(), "Check for missing files"),
        (lambda folder: (folder / "consolidated.01.pth").write_bytes(b"PK"), "consolidated.01.pth cannot be read"),
        (lambda folder: (folder / "params.json").unlink(), "has no params.json"),
        (lambda folder: (folder / "params.json").write_text("{"), "params.json is not valid JSON"),
        (lambda folder: (folder / "params.json").write_text("{}"), "lacks dim, n_layers, n_heads, norm_eps"),
        (
            lambda folder: (folder / "params.json").write_text(json.dumps(LLAMA3 | {"vision_chunk_size": 448})),
            "not a Llama 1, 2 or 3 text model: vision_chunk_size",
        ),
        (
            lambda folder: (folder / "params.json").write_text(json.dumps(LLAMA3 | {"n_layers": 3})),
            "only one of the two has .*layers.2.attention.wk.weight",
        ),
        (
            lambda folder: (folder / "params.json").write_text(json.dumps(LLAMA3 | {"n_kv_heads": 4})),
            r"wk.weight has shape \[16, 32\] in 2 files, but params.json implies \[32, 32\]",
        ),
    ],
)
def test_inconsistent_folders_are_rejected(tmp_path, capsys, change, message):
    folder = save(tmp_path / "meta", LLAMA3, tensors_of(LLAMA3), count=2)
    change(folder)
    assert re.search(message, fails(folder, capsys))


@pytest.mark.parametrize("value", [torch.nan, 3])
def test_nonfinite_and_integer_weights_are_rejected(tmp_path, capsys, value):
    tensors = tensors_of(LLAMA3)
    if value == 3:
        tensors["layers.1.attention.wo.weight"] = tensors["layers.1.attention.wo.weight"].to(torch.int8)
    else:
        tensors["layers.1.attention.wo.weight"][2, 3] = value
    folder = save(tmp_path / "meta", LLAMA3, tensors, count=2)
    assert "model.layers.1.self_attn.o_proj.weight" in fails(folder, capsys)


def test_folder_with_another_format(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").touch()
    assert "found model.gguf. For a GGUF model, name the file itself" in fails(tmp_path / "folder", capsys)
