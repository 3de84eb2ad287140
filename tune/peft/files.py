"""Adapters on disk, in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

import json
import math
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tune.checkpointers.export import SavesItself
from tune.distributed import World, full_tensor, local_shard
from tune.errors import TuneError
from tune.models.names import Names, own_name, peft_name
from tune.peft.adapters import (
    adapted_modules,
    is_tied,
    joined_experts,
)
from tune.peft.experts import LoRAExperts, joined, parted
from tune.peft.lora import LoRA, LoRALinear
from tune.peft.tokens import TokenRows
from tune.types import Fraction, PositiveFloat, PositiveInt

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GENERATION = "generation_config.json"
PREFIX, BASE_COPY = "base_model.model.", ".base_layer.weight"
HEAD = "lm_head.weight"
BESIDE_THE_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")  # starts that leave the base as it is


def adapter(
    path: str | None = None,
    rank: PositiveInt = 16,
    alpha: PositiveFloat = 32.0,
    dropout: Fraction = 0.0,
    target_modules: list[str] | str = "all-linear",
    rank_pattern: dict[str, PositiveInt] | None = None,
    alpha_pattern: dict[str, PositiveFloat] | None = None,
    rank_stabilized: bool = False,
    dora: bool = False,
    init: Literal["default", "pissa", "olora"] = "default",
    modules_to_save: list[str] | None = None,
    trainable_tokens: list[int] | None = None,
) -> LoRA:
    """The adapter in the folder `path`, or without one a new adapter as the other arguments say.

    Raises:
        TuneError: both, other than for the dropout: an adapter that exists has its own rank, targets and kind.
    """
    ranks, alphas = dict(rank_pattern or {}), dict(alpha_pattern or {})
    whole, tokens = list(modules_to_save or []), list(trainable_tokens or [])
    new = LoRA(rank, alpha, dropout, target_modules, ranks, alphas, rank_stabilized, dora, init, whole, tokens)
    if path is None:
        return new
    existing = read_adapter(path)
    names = [field.name for field in fields(LoRA) if field.name not in ("dropout", "exists")]
    clashes = [
        f"{name}={getattr(new, name)!r} (there it is {getattr(existing, name)!r})"
        for name in names
        if getattr(new, name) not in (getattr(LoRA(), name), getattr(existing, name))
    ]
    if clashes:
        raise TuneError(f"adapter.path: {path} decides what adapter it is; leave out {', '.join(clashes)}")
    return replace(existing, dropout=dropout or existing.dropout)  # the files of experts' adapters cannot say theirs


def read_adapter(path: str) -> LoRA:
    """What adapter the folder `path` holds.

    Raises:
        TuneError: there is none, or it is of a kind or has an option that is not supported.
    """
    file = Path(path) / CONFIG
    if not file.exists():
        found = ", ".join(sorted(child.name for child in Path(path).glob("*"))[:8]) or "nothing"
        raise TuneError(f"adapter.path: {path} has no {CONFIG}; found {found}")
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise TuneError(f"{file} is not JSON: {error}") from error
    if settings.get("peft_type") != "LORA":
        raise TuneError(f"{file}: peft_type is {settings.get('peft_type')!r}; only LORA is supported")
    unsupported = {
        "bias": "none", "fan_in_fan_out": False, "layers_to_transform": None, "layer_replication": None,
        "lora_bias": False, "use_qalora": False, "use_bdlora": None, "arrow_config": None,
        "alora_invocation_tokens": None, "kasa_config": None, "monteclora_config": None,
    }  # fmt: skip
    for name, supported in unsupported.items():
        if settings.get(name, supported) not in (supported, None, [], {}):
            raise TuneError(f"{file}: {name}={settings[name]!r} is not supported; supported: {supported!r}")
    targets = "target_parameters" if settings.get("target_parameters") else "target_modules"
    if missing := [name for name in ("r", "lora_alpha", targets) if not settings.get(name)]:
        raise TuneError(f"{file} has no {' and no '.join(missing)}; PEFT's save_pretrained writes it")
    if (init := settings.get("init_lora_weights", True)) not in (*BESIDE_THE_BASE, None):
        raise TuneError(
            f"{file}: init_lora_weights={init!r} took the adapter's start out of the base, and it does not fit the "
            "original one. Have PEFT write it for that: save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    tokens = settings.get("trainable_token_indices") or []
    if isinstance(tokens, dict):  # by module
        if any(each != next(iter(tokens.values())) for each in tokens.values()):
            raise TuneError(f"{file}: trainable_token_indices are others for each module, which is not supported")
        tokens = next(iter(tokens.values()), [])
    return LoRA(
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        dropout=settings.get("lora_dropout", 0.0),
        target_modules=_targets(settings),
        rank_pattern=settings.get("rank_pattern") or {},
        alpha_pattern=settings.get("alpha_pattern") or {},
        rank_stabilized=settings.get("use_rslora", False),
        dora=settings.get("use_dora", False),
        modules_to_save=settings.get("modules_to_save") or [],
        trainable_tokens=tokens,
        exists=True,
    )


def _targets(settings: dict[str, Any]) -> list[str] | str:
    """PEFT tells modules from parameters, where each of ours is a module by the one name or the other."""
    modules, parameters = settings.get("target_modules") or [], settings.get("target_parameters") or []
    if isinstance(modules, str):
        return "|".join([f"({modules})", *(rf"(.*\.)?{re.escape(name)}" for name in parameters)])
    return [*modules, *parameters]


def load_adapter(model: nn.Module, path: str) -> None:
    """Fill what `add_adapters` made trainable in `model` from the folder `path`. Each process reads its own slices.

    Raises:
        TuneError: names or shapes do not fit; all are named.
    """
    file = Path(path) / WEIGHTS
    parameters = _parameters(model)
    wanted = {
        own_name(name): list(tensor.shape)
        for names, parameter, part in parameters
        for name, tensor in _tensors(names, torch.empty(parameter.shape, device="meta"), part).items()
    }
    tied = _trains_tied_embedding(model)
    if tied and not json.loads((Path(path) / CONFIG).read_text()).get("ensure_weight_tying"):
        raise TuneError(
            f"adapter.path: {path} has an embedding that was trained apart from the output head (no "
            "ensure_weight_tying in its adapter_config.json), but in model.path they are tied"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {own_name(name): tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            for copy in [name for name in slices if name.endswith(BASE_COPY)]:
                _require_equal(model, copy, slices.pop(copy), path)
            found = {name: part.get_shape() for name, part in slices.items()}
            if tied:
                found.pop(PREFIX + HEAD, None)
            problems = [f"missing: {name}" for name in wanted.keys() - found.keys()]
            problems += [f"not known: {name} {found[name]}" for name in found.keys() - wanted.keys()]
            problems += [
                f"{name} has shape {found[name]}, this model needs {shape}"
                for name, shape in wanted.items()
                if name in found and found[name] != shape
            ]
            if problems:
                raise TuneError(f"adapter.path: {path} is for another model:\n  " + "\n  ".join(sorted(problems)[:12]))
            with torch.no_grad():
                for names, parameter, part in parameters:
                    shard, where = local_shard(parameter)
                    if isinstance(names, list):
                        for expert, name in zip(shard, names[where[0]], strict=True):
                            expert.copy_(slices[own_name(name)][where[1:]])
                    elif part:
                        shard.copy_(parted(part, slices[own_name(names)][:], parameter.shape[0])[where])
                    else:
                        shard.copy_(slices[own_name(names)][where])
    except (SafetensorError, OSError) as error:
        raise TuneError(f"adapter.path: {file} cannot be read: {error}") from error


def _require_equal(model: nn.Module, name: str, copy: Any, path: str) -> None:
    """PEFT writes an adapted embedding or head along with its adapter: it must be the one that `model` has."""
    names = Names.of(model)
    modules = {own_name(names.module(ours)): module for ours, module in adapted_modules(model).items()}
    module = modules.get(name.removeprefix(PREFIX).removesuffix(BASE_COPY))
    if isinstance(weight := getattr(module, "weight", None), torch.Tensor):
        if weight.is_meta:  # only the adapter has memory
            return
        shard, where = local_shard(weight)
        if copy.get_shape() == list(weight.shape) and torch.equal(shard, copy[where].to(shard)):
            return
    raise TuneError(
        f"adapter.path: {path} is for another model: its {name.removeprefix(PREFIX)} differs from model.path"
    )


def export_adapter(
    model: nn.Module,
    lora: LoRA,
    folder: str | Path,
    world: World,
    *,
    base: str,
    tokenizer: SavesItself,
    card: str = "",
) -> None:
    """Write the adapters of `model` such that PEFT, transformers and vLLM load them on top of the model `base`.

    All processes take part. The folder appears when it is complete.
    """
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    starts = _starts(model)
    tensors: dict[str, torch.Tensor] = {}
    for names, parameter, part in _parameters(model):
        full = full_tensor(parameter.detach()).to("cpu", torch.float32)
        if not world.is_main:
            continue
        for name, tensor in _tensors(names, full, part).items():
            if name in starts:
                start, dim, sign = starts[name]
                tensor = torch.cat([tensor, sign * start], dim)
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
            if name.endswith("embed_tokens.weight") and _trains_tied_embedding(model):
                tensors[PREFIX + HEAD] = tensor.clone()  # PEFT expects what is tied twice
    if world.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        (unfinished / CONFIG).write_text(json.dumps(_config(model, lora, base), indent=2) + "\n")
        (unfinished / "README.md").write_text(card)
        generation = Path(base) / GENERATION  # into which the tokenizer writes where to stop
        (unfinished / GENERATION).write_text(generation.read_text() if generation.exists() else "{}\n")
        tokenizer.save(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    world.barrier()


def _config(model: nn.Module, lora: LoRA, base: str) -> dict[str, Any]:
    names = Names.of(model)
    adapted = {peft_name(each): layer for name, layer in adapted_modules(model).items() for each in names.members(name)}
    layers = {name: layer for name, layer in adapted.items() if not isinstance(layer, TokenRows)}
    tokens = {name: layer.tokens for name, layer in adapted.items() if isinstance(layer, TokenRows)}
    parameters = {names.module(name) for name in joined_experts(model)}
    # With a frozen start the exported rank is twice the trained one, at the same scaling.
    rank_factor = 1 if lora.init == "default" else 2
    alpha_factor = math.sqrt(rank_factor) if lora.rank_stabilized else rank_factor
    whole = sorted({name.rpartition(".")[0] for name, _ in _whole_parameters(model)})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank * rank_factor,
        "lora_alpha": lora.alpha * alpha_factor,
        # PEFT cannot drop inputs of experts, and refuses to load what says so.
        "lora_dropout": 0.0 if any(isinstance(layer, LoRAExperts) for layer in layers.values()) else lora.dropout,
        "target_modules": _shortest(model, layers.keys() - parameters),
        "target_parameters": _shortest(model, parameters) or None,
        "rank_pattern": {name: layer.rank * rank_factor for name, layer in layers.items() if layer.rank != lora.rank},
        "alpha_pattern": {
            name: layer.alpha * alpha_factor for name, layer in layers.items() if layer.alpha != lora.alpha
        },
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": whole or None,
        "trainable_token_indices": tokens or None,
        "ensure_weight_tying": _trains_tied_embedding(model),
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _shortest(model: nn.Module, adapted: set[str]) -> list[str]:
    """The last parts of the names where they say exactly which layers were adapted; otherwise the names in full.

    A part of a larger model has full names: the others may have layers of the same kinds.
    """
    names = Names.of(model)
    kinds = {name.rpartition(".")[2] for name in adapted}
    modules = {peft_name(names.module(name)) for name, _ in model.named_modules()} | names.stacked_modules()
    matched = {name for name in modules if name.rpartition(".")[2] in kinds}
    is_part = any("language_model." in name for name in adapted)
    return sorted(kinds if matched == adapted and not is_part else adapted)


def _parameters(model: nn.Module) -> list[tuple[str | list[str], nn.Parameter, str]]:
    """All that an adapter's file holds, with the names there: several, if the parameter is their stack; and if it is
    `joined` there, which part of its adapter it is."""
    table = Names.of(model)
    found: list[tuple[str | list[str], nn.Parameter, str]] = []
    seen: set[nn.Parameter] = set()
    stacks = joined_experts(model)
    for name, layer in adapted_modules(model).items():
        for part, ending in layer.PARTS.items():
            parameter = getattr(layer, part)
            if parameter is not None and parameter not in seen:  # the rows of a tied head are those of the embedding
                names = [f"{PREFIX}{peft_name(module)}.{ending}" for module in table.members(name)]
                if name in stacks:
                    found.append((f"{PREFIX}{stacks[name]}.{ending}", parameter, part))
                else:
                    found.append((names if isinstance(layer, LoRAExperts) else names[0], parameter, ""))
                seen.add(parameter)
    return found + [(f"{PREFIX}{name}", parameter, "") for name, parameter in _whole_parameters(model)]


def _tensors(names: str | list[str], full: torch.Tensor, part: str) -> dict[str, torch.Tensor]:
    """What a file has of one of the `_parameters`, by name."""
    if isinstance(names, list):
        return dict(zip(names, full, strict=True))
    return {names: joined(part, full) if part else full}


def _whole_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the base that are trained, by PEFT's names."""
    on_disk = Names.of(model).on_disk
    parts = {getattr(layer, part) for layer in adapted_modules(model).values() for part in layer.PARTS}
    return [
        (peft_name(str(on_disk.get(name, name))), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter not in parts
    ]


def _trains_tied_embedding(model: nn.Module) -> bool:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(embedding.weight.requires_grad and is_tied(model, embedding) for embedding in embeddings)


def _starts(model: nn.Module) -> dict[str, tuple[torch.Tensor, int, int]]:
    """What is exported with a factor, by its name: the frozen start in full, along which dimension, and its sign."""
    names = Names.of(model)
    starts: dict[str, tuple[torch.Tensor, int, int]] = {}

    def full(start: torch.Tensor) -> torch.Tensor:
        return full_tensor(start).to("cpu", torch.float32)

    for name, layer in adapted_modules(model).items():
        if isinstance(layer, LoRALinear) and layer.start_a is not None and layer.start_b is not None:
            key = f"{PREFIX}{peft_name(names.module(name))}"
            starts[f"{key}.{layer.PARTS['lora_a']}"] = full(layer.start_a), 0, 1
            starts[f"{key}.{layer.PARTS['lora_b']}"] = full(layer.start_b), 1, -1
    return starts
