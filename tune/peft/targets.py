"""Which modules of a model the settings of an adapter name, and which of them are refused."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.models.moe import ExpertLinear
from tune.models.names import Names
from tune.peft.lora import LoRA, matches
from tune.quantization import NF4Weight

ADAPTABLE = (nn.Linear, nn.Embedding, ExpertLinear)


def adapted_layers(model: nn.Module, lora: LoRA) -> dict[str, Any]:
    """The layers that `lora.target_modules` names. Raises TuneError if it names none, or one that cannot be adapted."""
    names, wanted = Names.of(model), lora.target_modules
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, ADAPTABLE)}
    of_experts = {_last(name) for name in names.stacked_modules()}
    if wanted == "all-linear":
        # Not the head, which is no part of another module, and not a gate with one output. Not what has the name of an
        # expert's projection either: PEFT would take its adapter for one of an expert.
        found: Collection[str] = [
            name
            for name, layer in layers.items()
            if isinstance(layer, nn.Linear)
            and layer.out_features > 1
            and "." in name
            and _last(names.module(name)) not in of_experts
        ]
    elif isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise TuneError(
                f"adapter.target_modules: '{wanted}' is not a regular expression ({error}). To name layers give a list"
            ) from error
        found = [name for name in layers if any(pattern.fullmatch(known) for known in names.spellings(name))]
        if not found and _ending_with(wanted, layers, names):
            raise TuneError(
                f"adapter.target_modules: '{wanted}' is a regular expression, which must match a layer's whole name. "
                f"To name layers give a list: adapter.target_modules=[{wanted}]"
            )
    else:
        found = _named(model, "target_modules", wanted, layers)
    if not found:
        raise _no_match(model, "target_modules", str(wanted), layers)
    chosen = {name: layer for name, layer in layers.items() if name in found}
    for name, layer in chosen.items():
        _require_adaptable(model, names.module(name), layer, lora)
        if not isinstance(layer, ExpertLinear) and _last(names.module(name)) in of_experts:
            raise TuneError(
                f"adapter.target_modules: {names.module(name)} has the name of an expert's projection, and PEFT would "
                "take its adapter for one of an expert. To adapt the experts alone give a regular expression: "
                r"'.*(q_proj|v_proj|experts\.\d+\.\w+)'"
            )
    _require_experts_of_peft(names, {name for name, layer in chosen.items() if isinstance(layer, ExpertLinear)}, lora)
    _require_used_patterns(names, chosen, lora)
    return chosen


def _require_adaptable(model: nn.Module, known: str, layer: nn.Module, lora: LoRA) -> None:
    if is_tied(model, layer):
        raise _tied(known, known)
    kind = "dora=true" if lora.dora else f"init={lora.init}" if lora.init != "default" else ""
    if isinstance(layer, nn.Embedding) and type(layer) is not nn.Embedding:
        kind = type(layer).__name__
    if kind and not isinstance(layer, nn.Linear):
        what = "is an embedding" if isinstance(layer, nn.Embedding) else "is a layer of experts"
        raise TuneError(f"adapter.target_modules: {known} {what}, which {kind} does not support; leave it out")


def _require_experts_of_peft(names: Names, experts: set[str], lora: LoRA) -> None:
    """PEFT finds experts by the last part of their name in transformers, adapts gate and up together, and has one rank
    for all of them."""
    for name in experts:
        parent, _, last = name.rpartition(".")
        if names.is_joined(name):
            continue
        if not names.is_stack(name):
            raise TuneError(
                f"adapter.target_modules: the experts {names.module(name)} have another name in transformers than in a "
                "checkpoint, and PEFT finds them by the former alone; leave them out"
            )
        if (other := {"gate": "up", "up": "gate"}.get(last)) and f"{parent}.{other}" not in experts:
            raise TuneError(f"adapter.target_modules: PEFT adapts gate and up of experts together; name {other} too")
        if lora.at(*names.spellings(name)) != (lora.rank, lora.alpha):
            raise TuneError(f"adapter.rank_pattern: experts take adapter.rank and adapter.alpha; leave out {name}")


def _require_used_patterns(names: Names, targets: Iterable[str], lora: LoRA) -> None:
    known = {spelling for name in targets for spelling in names.spellings(name)}
    for setting, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in known):
                raise TuneError(
                    f"adapter.{setting}: no adapted layer's name ends with '{pattern}' or matches it; they end with "
                    f"{', '.join(sorted(set(map(_last, known))))}"
                )


def modules_to_save(model: nn.Module, lora: LoRA, targets: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that are trained in full. Raises TuneError if a name matches none, or one that cannot be."""

    def is_quantised(module: nn.Module) -> bool:
        return isinstance(getattr(module, "weight", None), NF4Weight)

    candidates = {
        name: module
        for name, module in model.named_modules()
        if is_quantised(module) or any(True for _ in module.parameters(recurse=False))
    }
    chosen = _named(model, "modules_to_save", lora.modules_to_save, candidates)
    for name, module in chosen.items():
        if name in targets:
            raise TuneError(f"adapter.modules_to_save: {name} has an adapter too (target_modules); choose one")
        if isinstance(module, ExpertLinear):
            raise TuneError(f"adapter.modules_to_save: {name} are experts, which PEFT cannot save in full; adapt them")
        if is_quantised(module):
            raise TuneError(f"adapter.modules_to_save: {name} is quantised and cannot be trained; leave it out")
    return chosen


def token_modules(
    model: nn.Module, lora: LoRA, others: Mapping[str, nn.Module]
) -> tuple[nn.Embedding, nn.Linear | None] | None:
    """The embedding, and the head if it is a module of its own, of which rows are trained; None without such tokens."""
    if not (tokens := lora.trainable_tokens):
        return None
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    name, embedding = max(embeddings.items(), key=lambda item: item[1].num_embeddings)
    size = embedding.num_embeddings
    heads = {
        name: module
        for name, module in model.named_children()
        if isinstance(module, nn.Linear) and module.out_features == size
    }
    if clash := {name, *heads} & others.keys():
        raise TuneError(f"adapter.trainable_tokens: {clash.pop()} is trained already in another way; choose one")
    if type(embedding) is not nn.Embedding:
        raise TuneError(f"adapter.trainable_tokens: {name} is a {type(embedding).__name__}, which is not supported")
    if outside := [token for token in tokens if not 0 <= token < size]:
        raise TuneError(
            f"adapter.trainable_tokens: {outside[0]} is no row of the embedding, which has {size}. To add tokens to "
            "the base first: tune add-tokens"
        )
    if len(set(tokens)) < len(tokens):
        raise TuneError("adapter.trainable_tokens: a token is named twice")
    return embedding, next(iter(heads.values()), None)


def is_tied(model: nn.Module, layer: nn.Module) -> bool:
    """Whether embedding and head share the weight of `layer`, which is one of them."""
    if isinstance(layer, nn.Embedding) and getattr(getattr(model, "config", None), "tied_head", False):
        return True
    return sum(getattr(module, "weight", None) is layer.weight for module in model.modules()) > 1


def _ending_with(wanted: str, candidates: Iterable[str], names: Names) -> list[str]:
    """The `candidates` that are called `wanted`, or whose name in any spelling ends with `.wanted`."""
    return [name for name in candidates if any(f".{known}".endswith(f".{wanted}") for known in names.spellings(name))]


def _named(
    model: nn.Module, setting: str, wanted: Iterable[str], candidates: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for each in wanted:
        matching = _ending_with(each, candidates, Names.of(model))
        if not matching:
            raise _no_match(model, setting, each, candidates)
        found |= {name: candidates[name] for name in matching}
    return found


def _no_match(model: nn.Module, setting: str, wanted: str, candidates: Mapping[str, nn.Module]) -> TuneError:
    names = Names.of(model)
    tied = [name for name, each in candidates.items() if isinstance(each, nn.Embedding) and is_tied(model, each)]
    if tied and wanted in ("lm_head", "head", "output"):
        if setting == "target_modules":
            return _tied(wanted, names.module(tied[0]))
        return TuneError(f"adapter.{setting}: {wanted} is tied to the embedding in this model; name the embedding")
    modules = dict(model.named_modules())
    if others := _ending_with(wanted, modules, names):
        if setting == "modules_to_save":
            return TuneError(f"adapter.{setting}: '{wanted}' has no parameters of its own; name the modules inside it")
        return TuneError(
            f"adapter.{setting}: '{wanted}' is {others[0]}, which is neither a linear layer nor an embedding and "
            f"cannot be adapted. To train it in full: adapter.modules_to_save=[{wanted}]"
        )
    known = sorted({_last(name) for candidate in candidates for name in names.spellings(candidate)})
    hint = did_you_mean(wanted, known)
    return TuneError(f"adapter.{setting}: '{wanted}' matches no layer.{hint} There are {', '.join(known)}")


def _tied(wanted: str, embedding: str) -> TuneError:
    return TuneError(
        f"adapter.target_modules: {wanted} is both embedding and output head, and an adapter would change only one of "
        f"the two. Train it in full, adapter.modules_to_save=[{embedding}], or some of its rows, "
        "adapter.trainable_tokens=[...]"
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
