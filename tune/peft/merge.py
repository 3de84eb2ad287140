"""Adapter into base, on disk, a file at a time."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tune.checkpointers.disk import disk_tensors
from tune.checkpointers.export import rewritten
from tune.errors import TuneError
from tune.models import build
from tune.models.config_file import ConfigFile
from tune.models.names import own_name, spellings
from tune.peft.adapters import add_adapters, joined_experts
from tune.peft.experts import LoRAExperts, joined, parted
from tune.peft.files import BASE_COPY, CONFIG, HEAD, PREFIX, WEIGHTS, read_adapter
from tune.peft.lora import LoRA, LoRAEmbedding, LoRALinear
from tune.peft.tokens import TokenRows
from tune.tokenizers import Tokenizer
from tune.tokenizers.tokenizer import FILES

LINEAR, EMBEDDING, ROWS = LoRALinear.PARTS, LoRAEmbedding.PARTS, TokenRows.PARTS["rows"]
ENDINGS = [*LINEAR.values(), *EMBEDDING.values(), ROWS]


def merge(base: str | Path, adapter: str | Path, out: str | Path, card: str = "") -> None:
    """Make `out` the model that `base` with `adapter` is: same names and types, adapted weights changed, and the
    tokenizer that the adapter was trained with, if its folder has one. `card` becomes its README.md.

    Holds the adapter and at most a file of 5 GB in memory. Products are computed in fp32. `out` appears, or is
    replaced, when it is complete.

    Raises:
        TuneError: the adapter has layers, or shapes, that the base has not; the base is quantised.
    """
    source = Path(base)
    config = ConfigFile(source)
    if config.get("quantization_config"):
        raise TuneError(
            f"{source} has quantised weights, which cannot take an adapter in; give the original checkpoint"
        )
    lora, changes, tensors = read_adapter(str(adapter)), _changes(Path(adapter)), disk_tensors(source)
    by_own = {own_name(name): name for name in tensors}
    if json.loads((Path(adapter) / CONFIG).read_text()).get("target_parameters"):
        _part_stacks(changes, source, Path(adapter), lora)
    if config.get("tie_word_embeddings"):
        _follow_ties(changes, HEAD in by_own, Path(adapter))
    # A checkpoint of the body alone leaves out the name that the body has in the whole model.
    changes = {by_own.get(name) or by_own.get(name.partition(".")[2], name): parts for name, parts in changes.items()}
    if unknown := [name for name in changes if name not in tensors]:
        raise TuneError(f"{adapter} is for another base: {source} has no {', '.join(unknown[:5])}")
    _require_shapes(changes, {name: tensor.shape for name, tensor in tensors.items()})
    _require_finite(changes, adapter)
    _require_same_vocabulary(source, Path(adapter))

    def change(name: str, weight: Tensor) -> Tensor:
        return _merged(weight, name, changes[name], lora).to(weight.dtype) if name in changes else weight

    card = card or (
        f"---\nbase_model: {source.name}\ntags: [tune]\n---\n\n"
        f"`{source.name}` with the adapter `{'/'.join(Path(adapter).parts[-2:])}` merged in by tune.\n"
    )
    with rewritten(source, Path(out), change) as folder:
        (folder / "README.md").write_text(card)
        if (Path(adapter) / "tokenizer.json").exists():
            for stale in [file for name in FILES for file in folder.glob(name)]:
                stale.unlink()
            Tokenizer(str(adapter)).save(folder)


def _changes(adapter: Path) -> dict[str, dict[str, Tensor]]:
    """What becomes of the base's tensors, by their own names: the parts of their adapter, or all by the name ""."""
    changes: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(adapter / WEIGHTS).items():
        name = own_name(key.removeprefix(PREFIX))
        if name.endswith(BASE_COPY):
            continue
        ending = next((ending for ending in ENDINGS if name.endswith(f".{ending}")), "")
        changed = f"{name.removesuffix(ending)}weight" if ending else name
        changes.setdefault(changed, {})[ending] = tensor
    return changes


def _part_stacks(changes: dict[str, dict[str, Tensor]], base: Path, adapter: Path, lora: LoRA) -> None:
    """Give the adapters of experts that are one tensor the name of that tensor, and matrices for each expert."""
    with torch.device("meta"):
        model = build(str(base))
    add_adapters(model, lora)
    for name, wrapped in joined_experts(model).items():
        layer = model.get_submodule(name)
        assert isinstance(layer, LoRAExperts)
        parts = changes.pop(f"{wrapped}.weight", {})
        needed = {ending: joined(part, getattr(layer, part)).shape for part, ending in LoRAExperts.PARTS.items()}
        if {ending: tensor.shape for ending, tensor in parts.items()} != needed:
            raise TuneError(
                f"{adapter} is for another base: what it has for {model.names.module(name)} does not fit "
                f"{layer.num_experts} experts at rank {layer.rank}"
            )
        a, b = (parted(part, parts[ending], layer.num_experts) for part, ending in LoRAExperts.PARTS.items())
        a, b = (b.mT, a.mT) if layer.transposed else (a, b)
        changes[own_name(model.names.module(name))] = {LINEAR["lora_a"]: a, LINEAR["lora_b"]: b}


def _require_shapes(changes: dict[str, dict[str, Tensor]], shapes: dict[str, list[int]]) -> None:
    for name, parts in changes.items():
        found = shapes[name]
        if LINEAR["lora_a"] in parts:
            needed = [*parts[LINEAR["lora_b"]].shape[:-1], parts[LINEAR["lora_a"]].shape[-1]]
        elif EMBEDDING["lora_a"] in parts:
            needed = [parts[EMBEDDING["lora_a"]].shape[1], parts[EMBEDDING["lora_b"]].shape[0]]
        elif ROWS in parts:
            needed = [found[0], parts[ROWS].shape[1]]
        else:
            needed = list(parts[""].shape)
        if needed != found:
            raise TuneError(
                f"the adapter is for another base: {name} is adapted as a weight of {needed}, the base has {found}"
            )


def _require_finite(changes: dict[str, dict[str, Tensor]], adapter: str | Path) -> None:
    for name, parts in changes.items():
        if not all(part.isfinite().all() for part in parts.values()):
            raise TuneError(f"{adapter} has values that are not finite for {name}: its training failed")


def _require_same_vocabulary(base: Path, adapter: Path) -> None:
    """An adapter's folder has the tokenizer it was trained with, if its writer put it there (ours and TRL do)."""
    if (adapter / "tokenizer.json").exists() and (base / "tokenizer.json").exists():
        theirs, ours = (Tokenizer(str(folder)).vocabulary for folder in (adapter, base))
        if changed := sorted(token for token, index in theirs.items() if ours.get(token) != index):
            listing = ", ".join(f"{token!r} ({theirs[token]}, in the base {ours.get(token)})" for token in changed[:3])
            raise TuneError(
                f"{adapter} was trained with another vocabulary than that of {base}: {listing}; give the base it was "
                "trained on"
            )


def _follow_ties(changes: dict[str, dict[str, Tensor]], has_head: bool, adapter: Path) -> None:
    """A tied head changes as the embedding does. Some checkpoints, and adapters, hold a copy of it."""
    changes.pop(HEAD, None)
    for name in [name for name in changes if name.endswith("embed_tokens.weight")]:
        tied = ROWS in changes[name] or json.loads((adapter / CONFIG).read_text()).get("ensure_weight_tying")
        if not tied or EMBEDDING["lora_a"] in changes[name]:
            raise TuneError(
                f"{adapter} changes the embedding apart from the output head, but in this base they are tied, and a "
                "merged model cannot hold both"
            )
        if has_head:
            changes[HEAD] = changes[name]


def _merged(weight: Tensor, name: str, parts: dict[str, Tensor], lora: LoRA) -> Tensor:
    """What becomes of a weight of the base; products are in fp32."""
    if "" in parts:
        return parts[""]
    if weight.dim() == 3:  # one expert at a time, since all in fp32 would be large
        merged = torch.empty_like(weight)
        for expert, into in enumerate(merged):
            into.copy_(_merged(weight[expert], name, {ending: part[expert] for ending, part in parts.items()}, lora))
        return merged
    if ROWS in parts:
        return weight.float().index_copy(0, torch.tensor(lora.trainable_tokens), parts[ROWS].float())
    scaling = lora.scaling(*lora.at(*spellings(name.removesuffix(".weight"))))
    if EMBEDDING["lora_a"] in parts:
        return weight.float() + scaling * (parts[EMBEDDING["lora_b"]].float() @ parts[EMBEDDING["lora_a"]].float()).T
    merged = weight.float() + scaling * parts[LINEAR["lora_b"]].float() @ parts[LINEAR["lora_a"]].float()
    if LINEAR["magnitude"] in parts:
        merged *= (parts[LINEAR["magnitude"]].float() / merged.norm(dim=1))[:, None]
    return merged
