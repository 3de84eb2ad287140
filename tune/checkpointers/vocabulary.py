"""Adding tokens to a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tune.atomic import written_aside
from tune.checkpointers.disk import disk_tensors
from tune.checkpointers.writing import copy_without_weights, write_tensors
from tune.errors import TuneError
from tune.models import build
from tune.tokenizers import Tokenizer


def add_tokens(base: str | Path, out: str | Path, tokens: Sequence[str]) -> list[int]:
    """Write to `out` the checkpoint `base` with `tokens` in its tokenizer and their rows in embedding and head.

    A new row is the mean of the rows of all existing tokens. Rows of the model beyond its tokenizer's tokens are used
    first. Everything else is as in `base`. `out` appears when it is complete. Returns the ids of the tokens.

    Raises:
        TuneError: a token exists already, or the model's family is not supported.
    """
    source = Path(base)
    tokenizer = Tokenizer(str(source))
    known = tokenizer.vocab_size
    ids = tokenizer.add_tokens(tokens)
    if there := [token for token, index in zip(tokens, ids, strict=True) if index < known]:
        raise TuneError(f"{source} has {', '.join(map(repr, there))} in its vocabulary already; leave it out")
    with torch.device("meta"):
        model = build(str(source))
    names = model.names
    tensors, rows = disk_tensors(source), max(model.config.vocab_size, tokenizer.vocab_size)
    ours = {"embedding.weight", "head.weight"}
    resized = {on_disk for name, on_disk in names.in_checkpoint(tensors).items() if name in ours}
    resized |= {copy for copy, name in names.copies.items() if name in ours}

    with written_aside(Path(out), folder=True) as unfinished:
        copy_without_weights(source, unfinished)
        read = ((name, tensor.read()) for name, tensor in tensors.items())
        resize = ((name, _with_rows(weight, rows, known, ids) if name in resized else weight) for name, weight in read)
        write_tensors(unfinished, resize)
        config = json.loads((source / "config.json").read_text())
        for section in (config, config.get("text_config", {})):  # the latter of a model that takes images too
            if "vocab_size" in section:
                section["vocab_size"] = rows
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save(unfinished)
    return ids


def _with_rows(weight: Tensor, rows: int, known: int, ids: list[int]) -> Tensor:
    larger = torch.cat([weight, weight.new_zeros(rows - len(weight), weight.shape[1])])
    larger[ids] = weight[:known].float().mean(dim=0).to(weight.dtype)
    return larger
