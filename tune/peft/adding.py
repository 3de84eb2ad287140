"""Adding adapters to a model: which modules the settings name, which are refused, and what is made of the others."""

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.models import ExpertLinear, Names, require_no_peft
from tune.peft.adapters import Adapter, adapted_modules, initialize, is_tied
from tune.peft.dropout import set_dropout_keys
from tune.peft.files import load_adapter
from tune.peft.lora import KINDS, LoRA, LoRAExperts, LowRank, matches
from tune.peft.tokens import TokenEmbedding, TokenHead, TokenRows
from tune.quantization import NF4Weight, block_linears, call_all_layers, count_parameters, uncalled_linears

HEADS = ("lm_head", "head", "output")


@dataclass(frozen=True)
class Adapted:
    """The result of `add_adapters`: by name, adapted modules and those trained in full; numbers of parameters.

    In a model with experts, `left_out` has the linear layers that `all-linear` does not adapt, and `hint` how to.
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


def add_adapters(model: nn.Module, lora: LoRA) -> Adapted:
    """Freeze `model`, any module, and give the layers that `lora` targets an adapter, in place.

    On the meta device the adapters are undefined until `initialize`; elsewhere they are initialized here, and the model
    computes what it did before. A layer narrower than the rank gets the largest rank that fits. Adapters that the model
    has already on other layers stay as they are, and are trained too.

    Raises:
        TuneError: a name matches no layer, or one that cannot be adapted or is adapted already; the model is sharded,
            or has adapters of the library peft.
    """
    require_no_peft(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise TuneError("adapter: the model is sharded already: FSDP would not train new parameters. Add them before")
    names, earlier = Names.of(model), adapted_modules(model)
    try:
        targets = adapted_layers(model, lora)
        whole = modules_to_save(model, lora, targets)
        with_tokens = token_modules(model, lora, {**targets, **whole})
    except TuneError as error:
        if lora.path is None:
            raise
        reason = str(error).partition(". ")[0].removeprefix("adapter.")  # the rest is for whoever chose the targets
        instead = "Take the model that it was trained on, or another adapter"
        raise TuneError(f"adapter.path: {lora.path} does not fit this model: {reason}. {instead}") from error
    if not earlier:
        model.requires_grad_(False)
    call_all_layers(model)
    widest = max((_largest_rank(layer) for layer in targets.values()), default=0)
    for name, layer in targets.items():
        rank, alpha = lora.at(*names.spellings(name))
        largest = _largest_rank(layer)
        if largest < rank and lora.path is None:
            if not rank == lora.rank <= widest:
                raise TuneError(
                    f"adapter.rank: {rank} is more than the width of {name} ({largest}); lower it, or the rank of such "
                    f"layers alone: adapter.rank_pattern={{{name.rpartition('.')[2]}: {largest}}}"
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
        load_adapter(model, lora.path)  # its names and shapes alone
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
    """How to adapt the experts that are `left_out`, or why they cannot be."""
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


def _largest_rank(layer: nn.Module) -> int:
    """Of a linear layer, its width; embeddings and experts take any rank."""
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
    """The layers that `lora.target_modules` names. Raises TuneError if it names none, or one that cannot be adapted."""
    names, wanted = Names.of(model), lora.target_modules
    layers: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, tuple(KINDS))}
    of_experts = {_last(name) for name in names.stacked_modules()}
    if wanted == "all-linear":
        # Not a gate with one output. Not what has the name of an expert's projection either: PEFT would take its
        # adapter for one of an expert.
        chosen: dict[str, Any] = {
            name: layer
            for name, layer in block_linears(model).items()
            if layer.out_features > 1 and _last(names.module(name)) not in of_experts
        }
    elif isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise TuneError(f"adapter.target_modules: '{wanted}' is not a regular expression: {error}") from error
        chosen = {name: layers[name] for name in layers if any(map(pattern.fullmatch, names.spellings(name)))}
    else:
        chosen = _named(model, "target_modules", wanted, layers)
    if not chosen:
        raise _no_match(model, "target_modules", str(wanted), layers)
    uncalled = uncalled_linears(model)
    for name, layer in chosen.items():
        if is_tied(model, layer):
            raise _tied(names.module(name), names.module(name))
        reason = _unsupported(name, layer, chosen, names, lora)
        if not isinstance(layer, ExpertLinear) and _last(names.module(name)) in of_experts:
            reason = "has the name of an expert's projection, and PEFT would take its adapter for one of an expert. To "
            reason += r"adapt experts alone give a regular expression: '.*(q_proj|v_proj|experts\.\d+\.\w+)'"
        is_head = hasattr(model, "head_input") and layer is model.head
        if lora.dropout and is_head:  # its body drops padding, its head not
            reason = "is the head of a model of transformers, which goes without dropout. Set adapter.dropout=0"
        if layer in uncalled:
            reason = "is never called: torch's attention reads its weight. Leave it out"
        if isinstance(layer, Adapter):
            reason = "has an adapter already. Name other layers, or merge it first (tune.peft.merge_in_place)"
        if reason:
            raise TuneError(f"adapter.target_modules: {names.module(name)} {reason}")
    known = {spelling for name in chosen for spelling in names.spellings(name)}
    for setting, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for key in patterns:
            if not any(matches(key, name) for name in known):
                ends = ", ".join(sorted(set(map(_last, known))))
                raise TuneError(
                    f"adapter.{setting}: no adapted layer's name ends with '{key}' or matches it; they end with {ends}"
                )
    return chosen


def _unsupported(name: str, layer: nn.Module, chosen: Collection[str], names: Names, lora: LoRA) -> str | None:
    """Why the layer `name` cannot be adapted together with all that are `chosen`."""
    kind = f"init={lora.init}" if lora.init != "default" else ""
    if lora.dora:
        kind = "dora=true"
    if isinstance(layer, nn.Embedding):
        kind = kind if type(layer) is nn.Embedding else type(layer).__name__
        return f"is an embedding, which {kind} does not support; leave it out" if kind else None
    if isinstance(layer, nn.Linear):
        return None
    if kind:
        return f"is a layer of experts, which {kind} does not support; leave it out"
    if names.is_joined(name):
        return None
    # PEFT finds experts by the last part of their name in transformers, adapts gate and up together, and has one rank
    # for all of them.
    if not isinstance(names.on_disk[f"{name}.weight"], list):
        return "has another name in transformers than in a checkpoint, and PEFT finds experts by the former; omit it"
    parent, _, last = name.rpartition(".")
    if (other := {"gate": "up", "up": "gate"}.get(last)) and f"{parent}.{other}" not in chosen:
        return f"is a layer of experts: PEFT adapts their gate and up together; name {other} too"
    if lora.at(*names.spellings(name)) != (lora.rank, lora.alpha):
        return "is a layer of experts, and experts take adapter.rank and adapter.alpha; leave it out of the patterns"
    return None


def modules_to_save(model: nn.Module, lora: LoRA, targets: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that are trained in full, a reward model's head always. Raises TuneError if a name matches none, or
    one that cannot be."""
    quantised = {name for name, module in model.named_modules() if isinstance(getattr(module, "weight", 0), NF4Weight)}
    candidates = {
        name: module
        for name, module in model.named_modules()
        if name in quantised or any(True for _ in module.parameters(recurse=False))
    }
    wanted = [*lora.modules_to_save]
    if getattr(getattr(model, "config", None), "scores", False):
        wanted.append("score")
    chosen = _named(model, "modules_to_save", wanted, candidates, any_end=True)
    for names, reason in (
        (chosen.keys() & {*targets, *adapted_modules(model)}, "has an adapter too (target_modules); choose one"),
        (chosen.keys() & quantised, "is quantised and cannot be trained; leave it out"),
        ({name for name in chosen if isinstance(chosen[name], ExpertLinear)}, "are experts, which PEFT cannot save"),
    ):
        if names:
            raise TuneError(f"adapter.modules_to_save: {min(names)} {reason}")
    return chosen


def token_modules(model: nn.Module, lora: LoRA, others: Mapping[str, nn.Module]) -> dict[nn.Module, list[int]]:
    """The modules of which rows are trained, and these rows: the embedding, and the head if it is a module of its own,
    or those of the two that are named."""
    if not lora.trainable_tokens:
        return {}
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    name, embedding = max(embeddings.items(), key=lambda item: item[1].num_embeddings)
    size = embedding.num_embeddings
    heads = {
        name: module
        for name, module in model.named_children()
        if isinstance(module, nn.Linear) and module.out_features == size
    }
    tokens_of = _tokens_of(model, lora.trainable_tokens, {name: embedding, **heads})
    if clash := tokens_of.keys() & {*others, *adapted_modules(model)}:
        raise TuneError(f"adapter.trainable_tokens: {clash.pop()} is trained already in another way; choose one")
    if name in tokens_of and type(embedding) is not nn.Embedding:
        raise TuneError(f"adapter.trainable_tokens: {name} is a {type(embedding).__name__}, which is not supported")
    tokens = [token for rows in tokens_of.values() for token in rows]
    if outside := [token for token in tokens if not 0 <= token < size]:
        raise TuneError(
            f"adapter.trainable_tokens: {outside[0]} is no row of the embedding, which has {size}. To add tokens to "
            "the base first: tune add-tokens"
        )
    if any(len(set(rows)) < len(rows) for rows in tokens_of.values()):
        raise TuneError("adapter.trainable_tokens: a token is named twice")
    return {model.get_submodule(name): rows for name, rows in tokens_of.items()}


def _tokens_of(
    model: nn.Module, wanted: list[int] | Mapping[str, list[int]], candidates: Mapping[str, Any]
) -> dict[str, list[int]]:
    """The rows that are trained of each of the `candidates`, the embedding first. Of a tied embedding these are also
    those of the head, as in PEFT. Raises TuneError if a name matches none of them, or a tied head has other rows."""
    embedding = next(iter(candidates))
    is_shared = is_tied(model, candidates[embedding])
    if not isinstance(wanted, Mapping):
        return dict.fromkeys(candidates, wanted)
    found: dict[str, list[int]] = {}
    others: list[list[int]] = []  # of a tied head that is no module of its own
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
            "adapter.trainable_tokens: embedding and head share their rows in this model; give both the same"
        )
    return dict.fromkeys(candidates, found[embedding])


def _named(
    model: nn.Module, setting: str, wanted: Iterable[str], candidates: Mapping[str, nn.Module], any_end: bool = False
) -> dict[str, nn.Module]:
    """The `candidates` whose name in any spelling is one of the `wanted`, or ends with `.wanted`. With `any_end` also
    those whose name in transformers ends with it anywhere, as PEFT has it for modules_to_save."""
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
    known = sorted({_last(name) for candidate in candidates for name in names.spellings(candidate)})
    hint = did_you_mean(wanted, known)
    if setting == "target_modules":
        hint += " A list names layers; a string is a regular expression that matches their whole name."
        hint += " Modules of other kinds are trained in full by adapter.modules_to_save."
    return TuneError(f"adapter.{setting}: '{wanted}' matches no layer.{hint} There are {', '.join(known)}")


def _tied(wanted: str, embedding: str) -> TuneError:
    return TuneError(
        f"adapter: {wanted} is both embedding and output head in this model: an adapter would change only one of the "
        f"two. Train it in full, adapter.modules_to_save=[{embedding}], or some rows, adapter.trainable_tokens=[...]"
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
