"""Add adapters to a model: select the modules that the settings name, check them, and adapt them."""

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.models import ExpertLinear, Names, Router, require_no_peft
from tune.parts import chosen_parts, part_of
from tune.peft.adapters import Adapter, adapted_modules, initialize, is_tied
from tune.peft.dropout import set_dropout_keys
from tune.peft.files import load_adapter
from tune.peft.lora import KINDS, LoRA, LoRAExperts, LoRASecondExperts, LowRank, matches
from tune.peft.tokens import TokenEmbedding, TokenHead, TokenRows
from tune.quantization import NF4Weight, block_linears, call_all_layers, count_parameters, uncalled_linears
from tune.types import checked

HEADS = ("lm_head", "head", "output")


@dataclass(frozen=True)
class Adapted:
    """The result of `add_adapters`: adapted modules (`layers`) and modules trained in full (`whole`), by name, and the
    numbers of parameters.

    In a model with experts, `left_out` has the linear layers that `all-linear` does not adapt; `hint` says how to adapt
    them.
    """

    layers: dict[str, Adapter]
    whole: dict[str, nn.Module]
    trainable: int
    total: int
    left_out: dict[str, nn.Module] = field(default_factory=dict)
    hint: str = ""

    def table(self) -> str:
        """A line for each kind of layer."""
        kinds: dict[str, list[nn.Module]] = {}
        for name, layer in {**self.layers, **self.whole, **self.left_out}.items():
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(layer)
        share, width = f"{self.trainable / self.total:.2%}", max(map(len, kinds)) + 2
        lines = [f"adapters: {self.trainable:,} of {self.total:,} parameters are trained ({share})"]
        for kind, layers in kinds.items():
            lines.append(f"  {kind:<{width}}x {len(layers):<4} {', '.join(sorted({_how(layer) for layer in layers}))}")
        return "\n".join([*lines, *([f"  {self.hint}"] if self.hint else [])])


@checked
def add_adapters(model: nn.Module, lora: LoRA) -> Adapted:
    """Freeze `model`, any module, and add an adapter to the layers that `lora` targets, in place.

    On the meta device, adapters are undefined until `initialize`. Elsewhere they are initialized here, and the model
    computes the same as before. A layer narrower than the rank gets the largest rank that fits. Existing adapters on
    other layers are kept and trained too.

    Raises:
        TuneError: a name matches no layer, or a layer that cannot be adapted or already is; or the model is sharded, or
            has adapters of the library peft.
    """
    if not isinstance(lora, LoRA):
        raise TuneError(f"lora: {type(lora).__name__} is not the type LoRA of tune.peft: LoRA(rank=16, alpha=32)")
    require_no_peft(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise TuneError(
            "adapter: the model is already sharded, and FSDP would not train new parameters. Add them first"
        )
    names, earlier = Names.of(model), adapted_modules(model)
    try:
        targets = adapted_layers(model, lora)
        whole = modules_to_save(model, lora, targets)
        with_tokens = token_modules(model, lora, {**targets, **whole})
    except TuneError as error:
        if lora.path is None:
            raise
        # The rest of the message is advice for people who choose targets.
        reason = str(error).partition(". ")[0].removeprefix("adapter.")
        instead = "Use the model that it was trained on, or another adapter"
        raise TuneError(f"adapter.path: {lora.path} does not fit this model: {reason}. {instead}") from error
    if not earlier:
        model.requires_grad_(False)
    call_all_layers(model)
    widest = max((_largest_rank(layer) for layer in targets.values()), default=0)
    for name, layer in targets.items():
        if (first := _shares_a(name, layer, targets, names, lora)) is not None:
            LoRASecondExperts.adapt_after(first, layer, name, lora)
            continue
        rank, alpha = lora.at(*names.patterned(name))
        largest = _largest_rank(layer)
        if largest < rank and lora.path is None:
            if not rank == lora.rank <= widest:
                raise TuneError(
                    f"adapter.rank: {rank} is more than the width of {name} ({largest}). Lower it, or lower the rank "
                    f"of these layers: adapter.rank_pattern={{{name.rpartition('.')[2]}: {largest}}}"
                )
            alpha *= lora.scaling(rank, 1) / lora.scaling(largest, 1)  # keeps the scaling of the other layers
            rank = largest
        kind = next(kind for base, kind in KINDS.items() if isinstance(layer, base))
        kind.adapt(layer, name, rank, alpha, lora)
    rows: dict[Any, TokenRows] = {}
    for module, tokens in with_tokens.items():
        kind_of_rows = TokenEmbedding if isinstance(module, nn.Embedding) else TokenHead
        weight = module.weight
        rows[weight] = kind_of_rows.adapt(module, tokens, rows.get(weight))
    if lora.dropout:
        model.has_dropout = True  # type: ignore[assignment]
        model.register_forward_pre_hook(set_dropout_keys)
    for module in whole.values():
        module.requires_grad_(True)
    if not next(model.parameters()).is_meta:
        initialize(model, seed=0, earlier=earlier)
    elif lora.path:
        load_adapter(model, lora.path)  # checks names and shapes
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    adapted = adapted_modules(model)
    left_out = _left_out(model, lora, {**adapted, **whole})
    hint = _hint(names, lora, targets, left_out)
    return Adapted(adapted, whole, trainable, count_parameters(model), left_out, hint)


def _left_out(model: nn.Module, lora: LoRA, chosen: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The linear layers of a model with experts that `all-linear` does not adapt."""
    experts = {name: layer for name, layer in model.named_modules() if isinstance(layer, ExpertLinear)}
    if lora.target_modules != "all-linear" or not experts:
        return {}
    return {name: layer for name, layer in {**block_linears(model), **experts}.items() if name not in chosen}


def _hint(names: Names, lora: LoRA, targets: Mapping[str, nn.Module], left_out: Mapping[str, nn.Module]) -> str:
    """How to adapt the experts in `left_out`, or why they cannot be adapted."""
    experts = {name: layer for name, layer in left_out.items() if isinstance(layer, ExpertLinear)}
    for name, layer in experts.items():
        if reason := _unsupported(name, layer, {**targets, **experts}, names, lora):
            return f"Experts cannot be adapted: {names.module(name)} {reason.partition('; ')[0]}"
    if not experts:
        return ""
    is_numbered = any(re.search(r"experts\.\d", known) for name in experts for known in names.members(name))
    ends = [
        *dict.fromkeys(_last(names.module(name)) for name in targets),
        r"experts\.\d+\.\w+" if is_numbered else r"experts\.\w+",
    ]
    return f"To adapt experts too: 'adapter.target_modules=.*({'|'.join(ends)})'"


def _shares_a(name: str, layer: nn.Module, targets: Mapping[str, Any], names: Names, lora: LoRA) -> Any:
    """The experts whose A the experts `name` use, since both are one parameter in transformers, if any."""
    parent, _, last = name.rpartition(".")
    first = targets.get(f"{parent}.gate")
    if not isinstance(layer, ExpertLinear) or last != "up" or first is None:
        return None
    return first if names.is_parameter(name, lora.target_parameters) else None


def _largest_rank(layer: nn.Module) -> int:
    """The width of a linear layer; embeddings and experts take any rank."""
    return min(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else sys.maxsize


def _how(layer: Any) -> str:
    if isinstance(layer, TokenRows):
        return f"{len(layer.tokens)} tokens"
    if not isinstance(layer, LowRank):
        return "trained in full" if any(each.requires_grad for each in layer.parameters()) else "none: left out"
    if isinstance(layer, LoRAExperts):
        return f"rank {layer.rank} for each of {layer.num_experts} experts"
    return f"rank {layer.rank}" + (" (the layer's width)" if layer.rank == _largest_rank(layer) else "")


def adapted_layers(model: nn.Module, lora: LoRA) -> dict[str, Any]:
    """The layers that `lora.target_modules` names. Raises TuneError if there are none, or if one cannot be adapted."""
    names, wanted = Names.of(model), lora.target_modules
    # Routers only have adapters by the names of their parameters: many other layers are called `gate`, too.
    weights: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, tuple(KINDS))}
    layers = {name: each for name, each in weights.items() if not isinstance(each, Router)}
    of_experts = {_last(name) for name in names.stacked_modules()}
    # Towers have layers of the same names as language models. A pattern for whole names, or PEFT, may mean those too.
    wanted_parts = chosen_parts(model)
    parts = wanted_parts or ("language",)
    of_parts = {name: each for name, each in layers.items() if part_of(model, name) in parts or lora.path is not None}
    if wanted == "all-linear":
        # Skip gates with one output, and layers with the name of an expert's projection, whose adapters PEFT would
        # apply to experts.
        chosen: dict[str, Any] = {
            name: layer
            for name, layer in block_linears(model, parts).items()
            if layer.out_features > 1 and _last(names.module(name)) not in of_experts
        }
    elif isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise TuneError(f"adapter.target_modules: '{wanted}' is not a regular expression: {error}") from error
        chosen = {name: layers[name] for name in layers if any(map(pattern.fullmatch, names.spellings(name)))}
    else:
        chosen = _named(model, "target_modules", wanted, of_parts)
    for each in lora.target_parameters:
        matching = {name: layer for name, layer in weights.items() if names.is_parameter(name, [each])}
        if not matching:
            ends = sorted({_last(names.parameter(name)) for name in weights} - {"weight"})
            raise TuneError(
                f"adapter.target_parameters: '{each}' matches no weight. Known names: "
                f"{', '.join([*ends, 'LAYER.weight'])}"
            )
        chosen |= matching
    chosen = {name: layer for name, layer in weights.items() if name in chosen}
    without = {*(wanted_parts or ())} - {part_of(model, name) for name in chosen}
    if without and chosen and lora.path is None and not lora.modules_to_save:
        raise TuneError(
            f"adapter.target_modules: none of the layers is in the {min(without)}, which model.parts lists. Name its "
            "layers in adapter.target_modules, or its modules in adapter.modules_to_save, or take it out of model.parts"
        )
    if not chosen:
        raise _no_match(model, "target_modules", str(wanted), layers)
    uncalled = uncalled_linears(model)
    for name, layer in chosen.items():
        if is_tied(model, layer):
            raise _tied(names.module(name), names.module(name))
        reason = _unsupported(name, layer, chosen, names, lora)
        is_made = lora.path is not None  # by PEFT, which applied it to this layer
        if not isinstance(layer, ExpertLinear) and _last(names.module(name)) in of_experts and not is_made:
            reason = "has the name of an expert's projection, so PEFT would apply its adapter to an expert. To adapt "
            reason += r"only experts, give a regular expression: '.*(q_proj|v_proj|experts\.\d+\.\w+)'"
        is_head = hasattr(model, "head_input") and layer is model.head
        if lora.dropout and is_head:  # the body drops padding, the head does not
            reason = "is the head of a transformers model, which does not support dropout. Set adapter.dropout=0"
        if layer in uncalled:
            reason = "is never called, since torch's attention reads its weight. Leave it out"
        if isinstance(layer, Adapter):
            reason = "already has an adapter. Choose other layers, or merge it first (tune.peft.merge_in_place)"
        if reason:
            raise TuneError(f"adapter.target_modules: {names.module(name)} {reason}")
    known = {spelling for name in chosen for spelling in names.patterned(name)}
    for setting, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for key in patterns:
            if not any(matches(key, name) for name in known):
                found = ", ".join(sorted(set(map(_last, known))))
                raise TuneError(
                    f"adapter.{setting}: no adapted layer's name ends with or matches '{key}'; names end with {found}"
                )
    return chosen


def _unsupported(name: str, layer: nn.Module, chosen: Collection[str], names: Names, lora: LoRA) -> str | None:
    """Why the layer `name` cannot be adapted together with the other `chosen` layers; None if it can."""
    kind = f"init={lora.init}" if lora.init != "default" else ""
    if lora.dora:
        kind = "dora=true"
    if isinstance(layer, nn.Embedding):
        kind = kind if type(layer) is nn.Embedding else type(layer).__name__
        return f"is an embedding, which {kind} does not support; leave it out" if kind else None
    if isinstance(layer, nn.Linear):
        return None
    if kind:
        what = "a router" if isinstance(layer, Router) else "a layer of experts"
        return f"is {what}, which {kind} does not support; leave it out"
    # PEFT finds experts by the last part of their name in transformers, adapts gate and up together, and supports one
    # rank for all experts.
    parent, _, last = name.rpartition(".")
    experts = f"{parent}.experts.down" if isinstance(layer, Router) else name
    if names.is_joined(experts):
        return None
    if not isinstance(names.on_disk.get(f"{experts}.weight"), list):
        return "has another name in transformers, by which PEFT finds experts, than in a checkpoint; leave it out"
    if isinstance(layer, Router) or names.is_parameter(name, lora.target_parameters):
        return None
    if (other := {"gate": "up", "up": "gate"}.get(last)) and f"{parent}.{other}" not in chosen:
        return f"is a layer of experts, of which PEFT adapts gate and up together; include {other}"
    if lora.at(*names.spellings(name)) != (lora.rank, lora.alpha):
        return "is a layer of experts, which must have adapter.rank and adapter.alpha; leave it out of the patterns"
    return None


def modules_to_save(model: nn.Module, lora: LoRA, targets: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules to train in full, always including a reward model's head. Raises TuneError if a name matches none, or
    a module that cannot be trained in full."""
    quantized = {name for name, module in model.named_modules() if isinstance(getattr(module, "weight", 0), NF4Weight)}
    candidates = {
        name: module
        for name, module in model.named_modules()
        if name in quantized or any(True for _ in module.parameters(recurse=False))
    }
    wanted = [*lora.modules_to_save]
    if getattr(getattr(model, "config", None), "scores", False):
        wanted.append("score")
    chosen = _named(model, "modules_to_save", wanted, candidates, any_end=True)
    for names, reason in (
        (chosen.keys() & {*targets, *adapted_modules(model)}, "also has an adapter (target_modules); choose one"),
        (chosen.keys() & quantized, "is quantized and cannot be trained; leave it out"),
        ({name for name in chosen if isinstance(chosen[name], ExpertLinear)}, "are experts, which PEFT cannot save"),
    ):
        if names:
            raise TuneError(f"adapter.modules_to_save: {min(names)} {reason}")
    return chosen


def token_modules(model: nn.Module, lora: LoRA, others: Mapping[str, nn.Module]) -> dict[nn.Module, list[int]]:
    """The modules with trained rows, and the rows: the embedding and, if it is a separate module, the head, or only the
    modules that the setting names."""
    if not lora.trainable_tokens:
        return {}
    embeddings = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and part_of(model, name) == "language"
    }
    name, embedding = max(embeddings.items(), key=lambda item: item[1].num_embeddings)
    size = embedding.num_embeddings
    heads = {
        name: module
        for name, module in model.named_children()
        if isinstance(module, nn.Linear) and module.out_features == size
    }
    tokens_of = _tokens_of(model, lora.trainable_tokens, {name: embedding, **heads})
    if clash := tokens_of.keys() & {*others, *adapted_modules(model)}:
        raise TuneError(f"adapter.trainable_tokens: {clash.pop()} is already trained in another way; choose one")
    if name in tokens_of and type(embedding) is not nn.Embedding:
        raise TuneError(f"adapter.trainable_tokens: {name} is a {type(embedding).__name__}, which is not supported")
    tokens = [token for rows in tokens_of.values() for token in rows]
    if outside := [token for token in tokens if not 0 <= token < size]:
        raise TuneError(
            f"adapter.trainable_tokens: {outside[0]} is not a row of the embedding, which has {size} rows. To add "
            "tokens to the base, use tune add-tokens"
        )
    if any(len(set(rows)) < len(rows) for rows in tokens_of.values()):
        raise TuneError("adapter.trainable_tokens: a token is listed twice")
    return {model.get_submodule(name): rows for name, rows in tokens_of.items()}


def _tokens_of(
    model: nn.Module, wanted: list[int] | Mapping[str, list[int]], candidates: Mapping[str, Any]
) -> dict[str, list[int]]:
    """The trained rows of each of the `candidates`, the embedding first. A tied head has the rows of the embedding, as
    in PEFT. Raises TuneError if a name matches no candidate, or if a tied head is given other rows."""
    embedding = next(iter(candidates))
    is_shared = is_tied(model, candidates[embedding])
    if not isinstance(wanted, Mapping):
        return dict.fromkeys(candidates, wanted)
    found: dict[str, list[int]] = {}
    others: list[list[int]] = []  # of a tied head that is not a module of its own
    for each, tokens in wanted.items():
        if is_shared and each.rpartition(".")[2] in HEADS:
            others.append(tokens)
        else:
            found |= dict.fromkeys(_named(model, "trainable_tokens", [each], candidates), tokens)
    if not is_shared:
        return {name: found[name] for name in candidates if name in found}
    if embedding not in found:
        raise _tied(next(iter(wanted)), Names.of(model).module(embedding))
    if any(tokens != found[embedding] for tokens in [*others, *found.values()]):
        raise TuneError(
            "adapter.trainable_tokens: embedding and head share their rows in this model; give both the same rows"
        )
    return dict.fromkeys(candidates, found[embedding])


def _named(
    model: nn.Module, setting: str, wanted: Iterable[str], candidates: Mapping[str, nn.Module], any_end: bool = False
) -> dict[str, nn.Module]:
    """The `candidates` of which any spelling of the name is one of `wanted`, or ends with `.wanted`.

    With `any_end`, also candidates whose name in transformers ends with `wanted` at any character, as PEFT matches
    modules_to_save.
    """
    names = Names.of(model)
    spellings = {name: names.spellings(name) for name in candidates}
    found: dict[str, nn.Module] = {}
    for each in wanted:
        matching = [
            name
            for name in candidates
            if any(f".{known}".endswith(f".{each}") for known in spellings[name])
            or (any_end and names.module(name).endswith(each))
        ]
        if not matching:
            raise _no_match(model, setting, each, candidates)
        found |= {name: candidates[name] for name in matching}
    return found


def _no_match(model: nn.Module, setting: str, wanted: str, candidates: Mapping[str, nn.Module]) -> TuneError:
    names = Names.of(model)
    tied = [name for name, each in candidates.items() if isinstance(each, nn.Embedding) and is_tied(model, each)]
    if tied and wanted in HEADS:
        return _tied(wanted, names.module(tied[0]))
    others = {name: module for name, module in model.named_modules() if f".{name}".endswith(f".{wanted}")}
    routers = [name for name, module in others.items() if isinstance(module, Router)]
    if routers and setting == "target_modules":
        weight = ".".join(names.parameter(routers[0]).split(".")[-2:])
        return TuneError(
            f"adapter.target_modules: '{wanted}' is a router, which has an adapter by the name of its weight: "
            f"adapter.target_parameters=[{weight}]"
        )
    elsewhere = {part_of(model, name) for name, module in others.items() if isinstance(module, nn.Linear)}
    if elsewhere - {"language"} and setting == "target_modules":
        return TuneError(
            f"adapter.target_modules: '{wanted}' is in the {min(elsewhere)}, which gets no adapters by default. List "
            f"it in model.parts, such as model.parts=[language, {min(elsewhere)}]"
        )
    if others and setting == "target_modules":
        kind = type(next(iter(others.values()))).__name__
        return TuneError(
            f"adapter.target_modules: '{wanted}' is a {kind}, which cannot have an adapter: only "
            "linear layers, embeddings and experts can. To train it in full, use adapter.modules_to_save"
        )
    known = sorted({_last(name) for candidate in candidates for name in names.spellings(candidate)})
    hint = did_you_mean(wanted, known)
    if setting == "target_modules":
        hint += " A list has names of layers; a string is a regular expression for whole names."
        hint += " To train other kinds of modules in full, use adapter.modules_to_save."
    return TuneError(f"adapter.{setting}: '{wanted}' matches no layer.{hint} Known names: {', '.join(known)}")


def _tied(wanted: str, embedding: str) -> TuneError:
    return TuneError(
        f"adapter: {wanted} is both embedding and output head in this model, and an adapter would change only one of "
        f"them. Train it in full, adapter.modules_to_save=[{embedding}], or some rows, adapter.trainable_tokens=[...]"
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
