"""Untrained rows of the embedding and the head are detected."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tune.checkpointers import add_tokens
from tune.models import build
from tune.peft import LoRA, add_adapters, tokens, untrained_tokens


def untrained(folder, ids, **settings):
    with torch.device("meta"):
        model = build(str(folder))
    add_adapters(model, LoRA(**settings))
    return untrained_tokens(model, folder, ids)


def test_added_row_is_found(checkpoint, tied_checkpoint, tmp_path):
    for base in (checkpoint, tied_checkpoint):
        (new,) = add_tokens(base, tmp_path / base.parent.name, ["<|call|>"])
        assert untrained(tmp_path / base.parent.name, [0, 1, new]) == [new]
        assert untrained(tmp_path / base.parent.name, [0, 1, new], trainable_tokens=[new]) == []


@pytest.mark.parametrize("chunk", [7, 16_384])
@pytest.mark.parametrize(
    ("name", "factors", "expected"),
    [
        ("model.embed_tokens.weight", {5: 1e-3, 9: 1e-3}, [5, 9]),
        ("lm_head.weight", {5: 1e-3, 299: 0.0}, [5, 299]),
        ("model.embed_tokens.weight", {5: 0.2, 9: 5.0}, []),
    ],
)
def test_rows_near_zero_are_found(checkpoint, tmp_path, monkeypatch, chunk, name, factors, expected):
    monkeypatch.setattr(tokens, "CHUNK", chunk)
    tensors = load_file(checkpoint / "model.safetensors")
    for row, factor in factors.items():
        tensors[name][row] *= factor
    copy(checkpoint, tmp_path, tensors)
    assert untrained(tmp_path, [0, 5, 9, 299]) == expected
    assert untrained(tmp_path, [0, 5, 9, 299], target_modules=["embed_tokens", "lm_head"]) == []


@pytest.mark.parametrize("chunk", [7, 16_384])
def test_duplicate_rows_are_found(checkpoint, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(tokens, "CHUNK", chunk)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"][5] = 1.1 * tensors["lm_head.weight"][250]
    copy(checkpoint, tmp_path, tensors)
    assert untrained(tmp_path, [4, 5, 6]) == [5]


def copy(checkpoint, folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(json.loads((checkpoint / "config.json").read_text())))
