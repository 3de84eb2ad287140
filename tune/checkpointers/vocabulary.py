"""New tokens for a model, on disk."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tune.checkpointers.disk import disk_tensors
from tune.checkpointers.export import rewritten
from tune.errors import TuneError
from tune.models import build
from tune.tokenizers import Tokenizer


def add_tokens(base: str | Path, out: str | Path, tokens: Sequence[str]) -> list[int]:
    """Make `out` the checkpoint `base` with `tokens` in its tokenizer and a row for each in embedding and head.

    A new row is the mean of the rows of all tokens there were. Rows that a model has in reserve, behind the tokens of
    its tokenizer, are taken first. Everything else is as in `base`. `out` appears when it is complete. Returns the ids.

    Raises:
        TuneError: a token is there already, or the model is of no family whose embedding is known.
    """
    source = Path(base)
    tokenizer = Tokenizer(str(source))
    known = tokenizer.vocab_size
    ids = tokenizer.add_tokens(tokens)
    if there := [token for token, index in zip(tokens, ids, strict=True) if index < known]:
        raise TuneError(
            f"{source} has {', '.join(map(repr, there))} in its vocabulary already; leave out what is there"
        )
    with torch.device("meta"):
        model = build(str(source))
    names = model.names
    tensors, rows = disk_tensors(source), max(model.config.vocab_size, tokenizer.vocab_size)
    ours = {"embedding.weight", "head.weight"}
    resized = {on_disk for name, on_disk in names.in_checkpoint(tensors).items() if name in ours}
    resized |= {copy for copy, name in names.copies.items() if name in ours}

    def change(name: str, weight: Tensor) -> Tensor:
        return _with_rows(weight, rows, known, ids) if name in resized else weight

    with rewritten(source, Path(out), change) as folder:
        config = json.loads((source / "config.json").read_text())
        _set_vocab_size(config, rows)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save(folder)
    return ids


def _with_rows(weight: Tensor, rows: int, known: int, ids: list[int]) -> Tensor:
    larger = torch.cat([weight, weight.new_zeros(rows - len(weight), weight.shape[1])])
    larger[ids] = weight[:known].float().mean(dim=0).to(weight.dtype)
    return larger


def _set_vocab_size(config: dict[str, Any], rows: int) -> None:
    """At the top, and for the text part of a model with others."""
    for section in (config, config.get("text_config", {})):
        if "vocab_size" in section:
            section["vocab_size"] = rows
