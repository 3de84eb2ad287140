"""Giving a model adapters: which layers, and what of the model is trained then."""

import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from tune.distributed import local_shard
from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.models.moe import ExpertLinear
from tune.models.names import Names
from tune.peft.experts import LoRAExperts
from tune.peft.lora import LoRA, LoRAEmbedding, LoRALinear, matches
from tune.peft.tokens import TokenEmbedding, TokenHead, TokenRows
from tune.quantization import NF4Weight

# What they share: `PARTS`, the trained parameters with the ends of their names in PEFT's files, and `start`.
Adapter: TypeAlias = LoRALinear | LoRAEmbedding | LoRAExperts | TokenRows
KINDS: dict[type[nn.Module], Any] = {nn.Linear: LoRALinear, nn.Embedding: LoRAEmbedding, ExpertLinear: LoRAExperts}


@dataclass(frozen=True)
class Adapted:
    """What `add_adapters` did: adapters and modules trained whole, by their names in the model; parameter counts."""

    layers: dict[str, Adapter]
    whole: dict[str, nn.Module]
    trainable: int
    total: int

    def table(self) -> str:
        """A line for each kind of layer."""
        kinds: dict[str, list[nn.Module]] = {}
        for name, layer in {**self.layers, **self.whole}.items():
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(layer)
        lines = [
            f"adapters: {self.trainable:,} of {self.total:,} parameters are trained ({self.trainable / self.total:.2%})"
        ]
        width = max(map(len, kinds)) + 2
        for kind, layers in kinds.items():
            lines.append(f"  {kind:<{width}}x {len(layers):<4} {', '.join(sorted({_how(layer) for layer in layers}))}")
        return "\n".join(lines)


def add_adapters(model: nn.Module, lora: LoRA) -> Adapted:
    """Freeze `model`, any module, and give the layers that `lora` targets an adapter, in place.

    On the meta device the adapters have undefined weights until `initialize`; elsewhere they get them here, and the
    model computes what it computed before. Layers narrower than the rank get the rank that fits.

    Raises:
        TuneError: nothing matches, or what matches cannot be adapted.
    """
    names = Names.of(model)
    targets = _targets(model, lora)
    whole = _trained_whole(model, lora, targets)
    token_modules = _token_modules(model, lora, {**targets, **whole})
    _require_used_patterns(model, lora, targets)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    widest = max((_room(layer) for layer in targets.values()), default=0)
    for name, layer in targets.items():
        rank, alpha = lora.at(*names.spellings(name))
        if _room(layer) < rank and not lora.exists:
            if not rank == lora.rank <= widest:
                raise _too_high(name, rank, _room(layer))
            alpha *= lora.scaling(rank, 1) / lora.scaling(_room(layer), 1)  # the scaling stays that of the others
            rank = _room(layer)
        kind = next(kind for base, kind in KINDS.items() if isinstance(layer, base))
        kind.adapt(layer, name, rank, alpha, lora)
    for embedding, head in token_modules:
        tied_to = TokenEmbedding.adapt(embedding, lora.trainable_tokens)
        if head is not None:
            TokenHead.adapt(head, lora.trainable_tokens, tied_to if head.weight is embedding.weight else None)
    for module in whole.values():
        module.requires_grad_(True)
    if not next(model.parameters()).is_meta:
        initialize(model, seed=0)
    parameters = list(model.parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return Adapted(adapted_modules(model), whole, trainable, sum(parameter.numel() for parameter in parameters))


def adapted_modules(model: nn.Module) -> dict[str, Adapter]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


def joined_experts(model: nn.Module) -> dict[str, str]:
    """The adapted experts that are one tensor on disk, by name, with what PEFT's files call their adapter: it wraps the
    module that has the tensors, anew for each of them, so that the last is outermost."""
    names = Names.of(model)
    found: dict[str, str] = {}
    for name, layer in reversed(adapted_modules(model).items()):
        if isinstance(layer, LoRAExperts) and names.is_joined(name):
            wrapped = names.module(name).rpartition(".")[0]
            while wrapped in found.values():
                wrapped += ".base_layer"
            found[name] = wrapped
    return found


def initialize(model: nn.Module, seed: int) -> None:
    """Weights of new adapters, the same on any layout; the base must have its weights. All processes must call it."""
    with torch.no_grad():
        for name, layer in adapted_modules(model).items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            for part, full in layer.start(generator).items():
                shard, where = local_shard(getattr(layer, part))
                shard.copy_(full[where])


def _room(layer: nn.Module) -> int:
    """The largest rank that fits a linear layer; no other kind gets another rank than was set."""
    return min(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else sys.maxsize


def _how(layer: nn.Module) -> str:
    if isinstance(layer, TokenRows):
        return f"{len(layer.tokens)} tokens"
    if isinstance(layer, LoRAExperts):
        return f"rank {layer.rank} for each of {layer.num_experts} experts"
    if not isinstance(layer, LoRALinear | LoRAEmbedding):
        return "trained whole"
    return f"rank {layer.rank}" + (" (its width: no higher one fits)" if layer.rank == _room(layer) else "")


def _targets(model: nn.Module, lora: LoRA) -> dict[str, Any]:
    names = Names.of(model)
    layers = {name: layer for name, layer in model.named_modules() if any(isinstance(layer, kind) for kind in KINDS)}
    wanted = lora.target_modules
    if wanted == "all-linear":
        experts = _of_experts(names)
        chosen = [name for name, layer in layers.items() if _is_of_all_linear(names, name, layer, experts)]
    elif isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise TuneError(
                f"adapter.target_modules: '{wanted}' is not a regular expression ({error}). To name layers give a list"
            ) from error
        chosen = [name for name in layers if any(pattern.fullmatch(known) for known in names.spellings(name))]
        if not chosen and any(_ends_with(known, [wanted]) for name in layers for known in names.spellings(name)):
            raise TuneError(
                f"adapter.target_modules: '{wanted}' is a regular expression, which must match a layer's whole name. "
                f"To name layers give a list: adapter.target_modules=[{wanted}]"
            )
    else:
        chosen = [name for name in layers if any(_ends_with(known, wanted) for known in names.spellings(name))]
        for each in wanted:
            if not any(_ends_with(known, [each]) for name in chosen for known in names.spellings(name)):
                raise _no_match(model, "target_modules", each, layers)
    if not chosen:
        raise _no_match(model, "target_modules", str(wanted), layers)
    for name in chosen:
        _require_adaptable(model, name, layers[name], lora)
    _require_told_apart(model, {name: layers[name] for name in chosen}, lora)
    return {name: layers[name] for name in chosen}


def _is_of_all_linear(names: Names, name: str, layer: nn.Module, experts: set[str]) -> bool:
    """Not the head, which stands at the top of a model, nor a gate of a single number; and in models with experts, not
    what is called as their projections are: PEFT takes an adapter of it for one of the experts."""
    is_wide = isinstance(layer, nn.Linear) and layer.out_features > 1
    return is_wide and "." in name and _last(names.module(name)) not in experts


def _of_experts(names: Names) -> set[str]:
    """How a checkpoint calls the projections of experts."""
    return {_last(name) for name in names.stacked_modules()}


def _require_told_apart(model: nn.Module, targets: Mapping[str, nn.Module], lora: LoRA) -> None:
    """PEFT knows experts by the last part of a name, with one rank for all, and gate and up only together; if they are
    one tensor, by what transformers calls it, which must be its name on disk."""
    experts = {name: layer for name, layer in targets.items() if isinstance(layer, ExpertLinear)}
    names = Names.of(model)
    of_experts = _of_experts(names)
    for name in targets:
        if name not in experts and _last(names.module(name)) in of_experts:
            raise TuneError(
                f"adapter.target_modules: {names.module(name)} is called as the projections of experts are, "
                "and PEFT would take its adapter for one of theirs. To adapt the experts give a regular expression: "
                r"'.*(q_proj|v_proj|experts\.\d+\.\w+)'"
            )
    for name in experts:
        if names.is_joined(name):
            continue
        if not names.is_stack(name):
            raise TuneError(
                f"adapter.target_modules: {names.module(name)} are experts that are called otherwise in "
                "transformers than in a checkpoint, and PEFT knows them by that name alone; leave them out"
            )
        other = {"gate": "up", "up": "gate"}.get(_last(name))
        if other and f"{name.rpartition('.')[0]}.{other}" not in experts:
            raise TuneError(
                f"adapter.target_modules: gate and up of experts go together, but only {_last(name)} is named"
            )
        if lora.at(*names.spellings(name)) != (lora.rank, lora.alpha):
            raise TuneError(f"adapter.rank_pattern: experts take adapter.rank and adapter.alpha; leave out {name}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _require_used_patterns(model: nn.Module, lora: LoRA, targets: Mapping[str, nn.Module]) -> None:
    names = Names.of(model)
    for setting, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if not any(matches(pattern, known) for name in targets for known in names.spellings(name)):
                kinds = sorted({_last(name) for target in targets for name in names.spellings(target)})
                raise TuneError(
                    f"adapter.{setting}: '{pattern}' is the end of no adapted layer's name; they are {', '.join(kinds)}"
                )


def _require_adaptable(model: nn.Module, name: str, layer: nn.Module, lora: LoRA) -> None:
    names = Names.of(model)
    known = names.module(name)
    if is_tied(model, layer):
        raise _is_tied(known, known)
    if isinstance(layer, nn.Embedding) and (lora.dora or lora.init != "default" or type(layer) is not nn.Embedding):
        kind = "dora=true" if lora.dora else f"init={lora.init}" if lora.init != "default" else type(layer).__name__
        raise TuneError(f"adapter.target_modules: {known} is an embedding, which {kind} has no form for; leave it out")


def _trained_whole(model: nn.Module, lora: LoRA, targets: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    names = Names.of(model)
    modules = {name: module for name, module in model.named_modules() if _has_parameters(module)}
    chosen: dict[str, nn.Module] = {}
    for wanted in lora.modules_to_save:
        found = [name for name in modules if any(_ends_with(known, [wanted]) for known in names.spellings(name))]
        if not found:
            raise _no_match(model, "modules_to_save", wanted, modules)
        chosen |= {name: modules[name] for name in found}
    for name, module in chosen.items():
        if name in targets:
            raise TuneError(f"adapter.modules_to_save: {name} has an adapter too (target_modules); choose one")
        if isinstance(module, ExpertLinear):
            raise TuneError(f"adapter.modules_to_save: {name} are experts, which PEFT cannot save whole; adapt them")
        if isinstance(getattr(module, "weight", None), NF4Weight):
            raise TuneError(f"adapter.modules_to_save: {name} is quantised and cannot be trained whole; leave it out")
    return chosen


def _has_parameters(module: nn.Module) -> bool:
    """Of its own, not of a module inside of it; quantised ones are."""
    is_quantised = isinstance(getattr(module, "weight", None), NF4Weight)
    return is_quantised or any(True for _ in module.parameters(recurse=False))


def _token_modules(
    model: nn.Module, lora: LoRA, others: Mapping[str, nn.Module]
) -> list[tuple[nn.Embedding, nn.Linear | None]]:
    """The token embedding and, where it is a module of its own, the head; nothing if no tokens are to be trained."""
    if not lora.trainable_tokens:
        return []
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    name, embedding = max(embeddings.items(), key=lambda item: item[1].num_embeddings)
    heads = {
        name: module
        for name, module in model.named_children()
        if isinstance(module, nn.Linear) and module.out_features == embedding.num_embeddings
    }
    if clash := {name, *heads} & others.keys():
        raise TuneError(f"adapter.trainable_tokens: {clash.pop()} is trained already in another way; choose one")
    if type(embedding) is not nn.Embedding:
        raise TuneError(f"adapter.trainable_tokens: {name} is a {type(embedding).__name__}, which is not supported")
    outside = [token for token in lora.trainable_tokens if not 0 <= token < embedding.num_embeddings]
    if outside:
        raise TuneError(
            f"adapter.trainable_tokens: {outside[0]} is no row of the embedding, which has {embedding.num_embeddings}. "
            "For new tokens make a base that has them first: tune add-tokens"
        )
    if len(set(lora.trainable_tokens)) < len(lora.trainable_tokens):
        raise TuneError("adapter.trainable_tokens: a token is named twice")
    return [(embedding, next(iter(heads.values()), None))]


def is_tied(model: nn.Module, layer: nn.Module) -> bool:
    """Whether the weight of the embedding or head `layer` is also that of the other."""
    if isinstance(layer, nn.Embedding) and getattr(getattr(model, "config", None), "tied_head", False):
        return True
    return sum(getattr(module, "weight", None) is layer.weight for module in model.modules()) > 1


def _too_high(name: str, rank: int, room: int) -> TuneError:
    return TuneError(
        f"adapter.rank: {rank} is more than {name} has dimensions ({room}); lower it, or that of such layers alone: "
        f"adapter.rank_pattern={{{_last(name)}: {room}}}"
    )


def _ends_with(name: str, endings: list[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _is_tied(wanted: str, embedding: str) -> TuneError:
    return TuneError(
        f"adapter.target_modules: {wanted} is the embedding and the output head at once, and an adapter would change "
        f"one of its two uses. Train it whole, adapter.modules_to_save=[{embedding}], or some tokens of it, "
        "adapter.trainable_tokens=[...]"
    )


def _no_match(model: nn.Module, setting: str, wanted: str, candidates: Mapping[str, nn.Module]) -> TuneError:
    names = Names.of(model)
    tied = [name for name, each in candidates.items() if isinstance(each, nn.Embedding) and is_tied(model, each)]
    if tied and wanted in ("lm_head", "head", "output"):
        embedding = names.module(tied[0])
        if setting == "target_modules":
            return _is_tied(wanted, embedding)
        return TuneError(f"adapter.{setting}: {wanted} is tied to the embedding in this model; name the embedding")
    modules = [known for name, _ in model.named_modules() for known in names.spellings(name)]
    others = [name for name in modules if _ends_with(name, [wanted])]
    if others and setting == "modules_to_save":
        return TuneError(f"adapter.{setting}: '{wanted}' has no parameters of its own; name the modules inside of it")
    if others:
        return TuneError(
            f"adapter.{setting}: '{wanted}' is {others[0]}, which is neither a linear layer nor an embedding; only "
            f"those are adapted. To train it whole: adapter.modules_to_save=[{wanted}]"
        )
    known = sorted({_last(name) for candidate in candidates for name in names.spellings(candidate)})
    hint = did_you_mean(wanted, known)
    return TuneError(f"adapter.{setting}: '{wanted}' matches no layer.{hint} There are {', '.join(known)}")
