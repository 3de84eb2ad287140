"""Merging an adapter into its base, on disk."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tune import distributed
from tune.checkpointers import Pretrained, export, open_checkpoint
from tune.errors import TuneError
from tune.peft.adapters import add_adapters
from tune.peft.combining import load_combined
from tune.peft.files import load_adapter, read_adapter
from tune.tokenizers import Tokenizer


def merge(
    base: str | Path, adapter: str | Path | Sequence[str | Path], out: str | Path, card: str = "", **combination: Any
) -> None:
    """Write to `out` the model `base` with `adapter` merged in, with the names and types of the base.

    The tokenizer is that of the adapter's folder, if it has one; `card` becomes README.md. The adapter and at most one
    file of 5 GB are in memory. Adapters are merged in fp32. Several become one first, see `load_combined` for the
    `combination`. `out` appears, or is replaced, when it is complete.

    Raises:
        TuneError: layers or shapes of the adapter do not fit the base; the base is quantised.
    """
    source, adapters = Path(base), [Path(each) for each in ([adapter] if isinstance(adapter, str | Path) else adapter)]
    model, weights, tokenizer = open_on_disk(source, *adapters, **combination)
    names = ", ".join(f"`{'/'.join(each.parts[-2:])}`" for each in adapters)
    what = f"adapter {names} merged" if len(adapters) == 1 else f"adapters {names} merged ({combination['method']})"
    card = card or f"---\nbase_model: {source.name}\ntags: [tune]\n---\n\n`{source.name}` with the {what} in by tune.\n"
    export(model, tokenizer, out, distributed.init("cpu"), source=str(source), card=card, base=weights)


def open_on_disk(
    source: Path, adapter: Path | None = None, *more: Path, **combination: Any
) -> tuple[Any, Pretrained, Tokenizer | None]:
    """The model `source` without memory but for the adapter, its weights, and the adapter's tokenizer, if it has one.
    Raises TuneError as `merge` does."""
    lora = read_adapter(str(adapter)) if adapter else None
    head: Literal["tokens", "score"] = "score" if lora and "score" in lora.modules_to_save else "tokens"
    model, weights = open_checkpoint(source, head)
    if adapter is None or lora is None:
        return model.requires_grad_(False), weights, None
    add_adapters(model, lora)
    give_memory(model)
    if more:
        load_combined(model, [adapter, *more], **combination)
    else:
        load_adapter(model, str(adapter))
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and not parameter.isfinite().all():
            raise TuneError(f"{adapter} has values that are not finite in {name}: its training failed")
    tokenizer = None
    if (adapter / "tokenizer.json").exists():  # tune and TRL save it
        tokenizer = Tokenizer(str(adapter))
        if (source / "tokenizer.json").exists():
            _require_same_vocabulary(source, tokenizer)
        if head == "score" and model.config.pad_id is None:
            model.config = replace(model.config, pad_id=tokenizer.pad_id)
    return model, weights, tokenizer


def give_memory(model: nn.Module) -> None:
    """Move trained parameters to the CPU; the base stays on the meta device. Shared parameters stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                made.setdefault(parameter, nn.Parameter(torch.empty_like(parameter, device="cpu")))
                setattr(module, name, made[parameter])


def _require_same_vocabulary(base: Path, tokenizer: Tokenizer) -> None:
    theirs, ours = tokenizer.vocabulary, Tokenizer(str(base)).vocabulary
    if changed := sorted(token for token, index in theirs.items() if ours.get(token) != index):
        listing = ", ".join(f"{token!r} ({theirs[token]}, in the base {ours.get(token)})" for token in changed[:3])
        raise TuneError(f"the adapter was trained with another vocabulary than {base} has: {listing}; give its base")
