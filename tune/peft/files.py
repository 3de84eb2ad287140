"""Read and write adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

import inspect
import json
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tune import rehearsal
from tune.checkpointers import (
    DiskTensor,
    Pretrained,
    export,
    has_weights,
    headers,
    load_shard,
    metadata_of,
    model_digest,
    plain_tensors,
    require_finite_on_all,
    require_floats,
    save_tensors,
    shape_differences,
)
from tune.distributed import World, current_world, from_its_stage, full_tensor, local_shard, uncut
from tune.errors import TuneError, explained
from tune.files import ADAPTER_CONFIG, content_digest, exported, require_replaceable
from tune.models import Decoder, HuggingFaceModel, Names, OnDisk, disk_parts, own_name, read_json
from tune.peft.adapters import Adapter, adapted_modules, initialize, is_tied
from tune.peft.lora import LoRA, LoRAExperts, LoRALinear, LoRARouter, LoRASecondExperts, LowRank
from tune.peft.tokens import TokenRows
from tune.tokenizers import Tokenizer
from tune.types import Fraction, checked, mismatch

CONFIG, WEIGHTS = ADAPTER_CONFIG, "adapter_model.safetensors"
GENERATION = "generation_config.json"
PREFIX, BASE_COPY = "base_model.model.", ".base_layer.weight"
# If the vocabulary was resized, PEFT saves a module that is trained in full as its `.weight`, and again as the parts of
# its wrapper: the trained weight, and the base's, which the trained one replaces.
WRAPPED = ".modules_to_save.weight", ".original_module.weight"
VOCABULARY = "embed_tokens.weight", "lm_head.weight"
HEAD = "lm_head.weight"
BASE = "base_xxh3"  # the digest of the base, in the header of the weights, where other programs ignore it
SCORES = "SEQ_CLS"  # PEFT's task type of models with a scoring head
FIELDS = {  # field of LoRA -> its name in PEFT's config
    "rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rank_stabilized": "use_rslora", "dora": "use_dora",
    "target_parameters": "target_parameters",
    "rank_pattern": "rank_pattern", "alpha_pattern": "alpha_pattern", "modules_to_save": "modules_to_save",
}  # fmt: skip
BESIDE_THE_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "mica")  # init_lora_weights that keep the base
KINDS = {theirs: LoRA.__annotations__[ours] for ours, theirs in FIELDS.items()} | {
    "target_modules": list[str] | str, "exclude_modules": list[str] | str,
    "trainable_token_indices": LoRA.__annotations__["trainable_tokens"], "base_model_name_or_path": str,
}  # fmt: skip
UNSUPPORTED = (
    "bias", "fan_in_fan_out", "layers_to_transform", "layer_replication", "lora_bias", "use_qalora", "use_bdlora",
    "arrow_config", "alora_invocation_tokens", "kasa_config", "monteclora_config",
)  # fmt: skip


def adapter(path: str | None = None, dropout: Fraction | None = None, **settings: Any) -> LoRA:
    """Return the settings of the adapter in the folder `path`, or of a new one: `settings`, the other fields of `LoRA`.

    `dropout` null: that of the adapter in `path`; 0 in a new one.

    Raises:
        TuneError: `settings` contradict the adapter in `path`, which has its own rank, targets and kind. Only its
            dropout may be changed.
    """
    if path is None:
        return LoRA(dropout=dropout or 0.0, **settings)
    existing, unset = read_adapter(path), LoRA()
    accepted = {name: [getattr(unset, name), getattr(existing, name)] for name in settings}
    if "target_modules" in settings and isinstance(existing.target_modules, list):
        # Experts that are one tensor are modules here, and parameters in the file.
        accepted["target_modules"].append([*existing.target_modules, *existing.target_parameters])
    clashes = [
        f"{name}={value!r} (the adapter has {accepted[name][-1]!r})"
        for name, value in settings.items()
        if value not in accepted[name]
    ]
    if clashes:
        raise TuneError(f"adapter.path: {path} has its own settings. Remove {', '.join(clashes)}")
    # PEFT's files for experts cannot have a dropout.
    return existing if dropout is None else replace(existing, dropout=dropout)


def _signature() -> inspect.Signature:
    """Return what settings of `adapter` are checked against: the fields of `LoRA`, with a dropout that may be null."""
    fields = inspect.signature(LoRA).parameters
    dropout = fields["dropout"].replace(annotation=Fraction | None, default=None)
    return inspect.Signature([*(fields | {"dropout": dropout}).values()])


adapter.__signature__ = _signature()  # type: ignore[attr-defined]


def read_adapter_config(path: str | Path) -> dict[str, Any]:
    """The fields of the adapter's config in the folder `path`. Raises TuneError if there is none, if it is not of a
    LoRA adapter, or if a field is missing or has a value of another type."""
    file = Path(path) / CONFIG
    settings = read_json(file, "adapter.path")
    if settings.get("peft_type") != "LORA":
        raise TuneError(f"{file}: peft_type is {settings.get('peft_type')!r}; only LORA is supported")
    if settings.get("megatron_config"):
        raise TuneError(f"{file}: megatron_config is not supported: PEFT would import the module in megatron_core")
    for name, kind in KINDS.items():
        value = settings.get(name)
        if value is not None and (problem := mismatch(value, kind)):
            raise TuneError(f"{file}: {name}: {problem} Save the adapter again with PEFT's save_pretrained")
    patterns = {name: [*(settings.get(name) or ())] for name in ("rank_pattern", "alpha_pattern")}
    if isinstance(target := settings.get("target_modules"), str):
        patterns["target_modules"] = [target]
    for name, each in patterns.items():
        for pattern in each:
            with explained(f"{file}: {name}: {pattern!r} is not a regular expression", re.error):
                re.compile(pattern)
    targets = "target_parameters" if settings.get("target_parameters") else "target_modules"
    if missing := [name for name in ("r", "lora_alpha", targets) if not settings.get(name)]:
        raise TuneError(f"{file} has no {' and no '.join(missing)}. Save the adapter with PEFT's save_pretrained")
    return settings


def read_adapter(path: str | Path) -> LoRA:
    """The settings of the adapter in the folder `path`. Raises TuneError as `read_adapter_config` does, or if an option
    is not supported."""
    file, settings = Path(path) / CONFIG, read_adapter_config(path)
    for name in UNSUPPORTED:
        if settings.get(name) not in (None, False, "none", [], {}):
            raise TuneError(f"{file}: {name}={settings[name]!r} is not supported, only PEFT's default")
    if (init := settings.get("init_lora_weights")) not in BESIDE_THE_BASE:
        raise TuneError(
            f"{file}: init_lora_weights={init!r} subtracted the adapter's start from the base, so the adapter does not "
            "match the original base. Have PEFT convert it: "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    tokens = settings.get("trainable_token_indices") or []
    if isinstance(tokens, list) and tokens:  # a list is for the embedding, whatever its name
        tokens = dict.fromkeys(_on_disk(Path(path) / WEIGHTS, f".{TokenRows.PARTS['rows']}"), tokens)
    target_modules = settings.get("target_modules") or []
    # The targets are those with tensors: others are excluded, or have the names of experts that PEFT could not find.
    if settings.get("exclude_modules") or _has_only_shared_experts(Path(path) / WEIGHTS):
        target_modules = _on_disk(Path(path) / WEIGHTS, ".lora_")
    if settings.get("task_type") == SCORES:  # PEFT saves several names of scoring heads; models here have one
        settings["modules_to_save"] = [*({*(settings.get("modules_to_save") or ()), "score"} - {"classifier"})]
    fields = {ours: settings[theirs] for ours, theirs in FIELDS.items() if settings.get(theirs)}
    return LoRA(path=str(path), target_modules=target_modules, trainable_tokens=tokens, **fields)


def _has_only_shared_experts(file: Path) -> bool:
    """Whether an adapter's file has adapters of shared experts, but none of other experts."""
    names = [tensor.name for tensor in headers(file)] if file.exists() else []
    return any(".shared_expert" in name for name in names) and not any(".experts." in name for name in names)


def trained_modules(path: str | Path) -> list[str]:
    """PEFT's names of the modules that the adapter in the folder `path` changes; none if it has no weights."""
    file = Path(path) / WEIGHTS
    names = [tensor.name.removeprefix(PREFIX) for tensor in headers(file)] if file.exists() else []
    return sorted({re.split(r"\.(lora_|token_adapter\.|weight$|bias$)", name)[0] for name in names})


def _on_disk(file: Path, part: str) -> list[str]:
    """The names of the modules with tensors in an adapter's file whose names contain `part`."""
    if not file.exists():
        raise TuneError(f"adapter.path: {file.parent} has no {WEIGHTS}")
    names = [tensor.name.removeprefix(PREFIX) for tensor in headers(file)]
    return sorted({name.partition(part)[0] for name in names if part in name})


@checked
def load_adapter(model: nn.Module, path: str | Path) -> None:
    """Load the trained parameters of `model` from the folder `path`. Each process reads its own slices.

    Raises:
        TuneError: names or shapes do not match (the message lists all), or the adapter's scaling (alpha, rank, rsLoRA)
            or kind (DoRA) differs from that of a layer.
    """
    load_parameters(model, path, read_adapter(path))


def _require_same_kind(model: nn.Module, theirs: LoRA) -> None:
    """Raise TuneError if either the adapters of `model` or `theirs` is DoRA, but not both."""
    for name, layer in adapted_modules(uncut(model)).items():
        if isinstance(layer, LoRALinear) and (layer.magnitude is not None) != theirs.dora:
            raise _other_settings(name, theirs, f"dora={theirs.dora}", f"dora={not theirs.dora}")


def _require_same_scaling(model: nn.Module, theirs: LoRA) -> None:
    """Raise TuneError if a layer of `model` has another scaling factor than `theirs`."""
    whole = uncut(model)
    names = Names.of(whole)
    for name, layer in adapted_modules(whole).items():
        if isinstance(layer, LowRank):
            rank, alpha = theirs.at(*names.patterned(name))
            if not math.isclose(theirs.scaling(rank, alpha), layer.scaling, rel_tol=1e-6):
                there = f"alpha={alpha:g}, rank={rank}, rank_stabilized={theirs.rank_stabilized}"
                is_stabilized = layer.settings.rank_stabilized
                here = f"alpha={layer.alpha:g}, rank={layer.rank}, rank_stabilized={is_stabilized}"
                raise _other_settings(names.module(name), theirs, there, here)


def _other_settings(layer: str, theirs: LoRA, there: str, here: str) -> TuneError:
    return TuneError(
        f"adapter.path: {theirs.path} was trained with {there} in {layer}, but the model has {here}. Add the adapter "
        "with the settings of the file: add_adapters(model, read_adapter(path))"
    )


def load_parameters(model: nn.Module, path: str | Path, theirs: LoRA | None = None) -> None:
    """Like `load_adapter`, with the folder's settings `theirs`; with None, scaling and kind are not checked."""
    if theirs is not None:
        if not adapted_modules(uncut(model)):
            raise TuneError(
                "the model has no adapters to load into. First call add_adapters(model, read_adapter(path))"
            )
        _require_same_kind(model, theirs)
    file, parts = Path(path) / WEIGHTS, _parts(model)
    stored = [part.stored(part.empty()) for part in parts]
    needed = {own_name(name): list(tensor.shape) for each in stored for name, tensor in each.items()}
    tied, settings = _trains_tied_embedding(model), read_json(Path(path) / CONFIG, "adapter.path")
    if tied and not settings.get("ensure_weight_tying"):
        raise TuneError(
            f"adapter.path: {path} trained the embedding separately from the output head, but model.path ties them"
        )
    if not file.exists():
        raise TuneError(f"adapter.path: {path} has no {WEIGHTS}")
    found = {own_name(tensor.name): tensor for tensor in headers(file)}
    _compare_with_base(model, found, needed.keys(), path)
    shapes = {name: tensor.shape for name, tensor in found.items() if not tied or name != PREFIX + HEAD}
    base = settings.get("base_model_name_or_path")
    if differences := shape_differences(shapes, needed, "this model needs") or _other_type(base, model):
        source = getattr(model, "source", "this one")
        if resized := _resized_vocabulary(shapes, needed):
            raise TuneError(f"adapter.path: {path}: {resized}. Differences:\n  {differences}")
        if base == source:
            cause = f"its {CONFIG} does not match its weights (r, rank_pattern, target_modules). Copy both again"
        else:
            cause = f"it was trained on {base or 'another one'}, not on {source}. Use that model, or another adapter"
        raise TuneError(f"adapter.path: {path} is for another model: {cause}. Differences:\n  {differences}")
    require_floats([found[name] for name in needed], "adapter.path")
    if theirs is not None:
        _require_same_scaling(model, theirs)
    if rehearsal.current():
        return
    if not all(part.is_meta for part in parts):  # else names and shapes are checked only
        warn_of_another_base(path, metadata_of(file).get(BASE), getattr(model, "source", None))
    with torch.no_grad():
        for part, each in zip(parts, stored, strict=True):
            part.load({name: found[own_name(name)] for name in each})


def digest_of_base(folder: str | Path | None) -> str | None:
    """The digest of the model in `folder`; None if `folder` is not a folder with weights."""
    if not folder or not Path(folder).is_dir() or not has_weights(Path(folder)):
        return None
    return model_digest(Path(folder), plain_tensors(Path(folder)).values())


def warn_of_another_base(adapter: str | Path, digest: str | None, base: str | Path | None) -> None:
    """Warn, on rank 0, if `adapter` was trained on a base with another `digest` than the model in `base`."""
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    if is_main and digest and (now := digest_of_base(base)) and now != digest:
        warnings.warn(
            f"{adapter} was trained on a base with other weights or another config.json than {base} has now (xxh3 "
            f"{digest}, now {now}), so the model may be worse than the trained one. Use the base of the training if "
            "this is not intended",
            stacklevel=3,
        )


def warn_of_changed_base(checkpoint: str | Path, changed: Sequence[str], base: str | Path) -> None:
    """Warn, on rank 0, if the training of a `checkpoint` also changed frozen weights, which `base` does not have."""
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    if is_main and changed:
        warnings.warn(
            f"{checkpoint}: the training loop changed {len(changed)} frozen parameter(s), such as {changed[0]}. This "
            f"model has their values in {base}, so it is not the trained one. Continue the run to its end, and use its "
            "export",
            stacklevel=3,
        )


def _other_type(base: str | None, model: Any) -> str:
    """The difference if `base` has another model type than `model`, whose layers then differ despite equal shapes; else
    ""."""
    files = (Path(each, "config.json") for each in (base, getattr(model, "source", None)) if each)
    read = map(read_json, filter(Path.is_file, files))
    types = [(each.get("text_config") or each).get("model_type") for each in read]
    return f"model_type: {types[0]} there, {types[1]} here" if len({*types} - {None}) == 2 else ""


def _resized_vocabulary(shapes: Mapping[str, list[int]], needed: Mapping[str, list[int]]) -> str:
    """The problem and advice if the adapter was trained with another number of tokens than the model has; else ""."""
    whole = sorted(name for name in shapes if name.endswith(VOCABULARY))
    if unnamed := [name for name in whole if name not in needed]:
        return (
            f"it has {' and '.join(unnamed)}, which its {CONFIG} does not name: PEFT adds them if the vocabulary was "
            "resized. Merge it with PEFT (merge_and_unload) into the resized model, and use that one"
        )
    for name in whole:
        theirs, ours = shapes[name], needed[name]
        if theirs[0] != ours[0] and theirs[1:] == ours[1:]:
            return (
                f"it was trained with a vocabulary of {theirs[0]} tokens, and the model has {ours[0]}. Add the same "
                "tokens to the model first: tune add-tokens BASE OUT TOKEN ..."
            )
    return ""


def _compare_with_base(
    model: nn.Module, found: dict[str, DiskTensor], needed: Collection[str], path: str | Path
) -> None:
    """Take the copies of base weights that PEFT saved with an adapter out of `found`.

    Raises TuneError if one belongs to an adapted embedding or head and differs from that of `model`. A
    whole embedding or head that differs, and is not `needed`, stays in `found`. Warns if a weight that
    was replaced as a whole differs.
    """
    names = Names.of(model)
    ours = {own_name(PREFIX + on_disk): name for name, on_disk in names.on_disk.items() if isinstance(on_disk, str)}
    ours |= {own_name(PREFIX + on_disk): name for on_disk, name in names.copies.items()}
    ours |= {own_name(PREFIX + in_peft): name for name, in_peft in names.in_peft.items()}
    for name in [*found]:
        if name.endswith(BASE_COPY):
            copy, place = found.pop(name), ours.get(f"{name.removesuffix(BASE_COPY)}.weight")
            if place is None or _is_in_base(model, place, copy) is False:
                what = f"{name.removeprefix(PREFIX)} differs from model.path"
                raise TuneError(f"adapter.path: {path} is for another model: {what}")
        elif name.endswith(WRAPPED) and (trained := f"{name.rpartition('.')[0].rpartition('.')[0]}.weight") in found:
            copy, is_base = found.pop(name), name.endswith(WRAPPED[1])
            if is_base and _is_in_base(model, ours.get(trained), copy) is False:
                warnings.warn(
                    f"{path} was trained on a base with another {trained.removeprefix(PREFIX)} than the model, so the "
                    "model may be worse than the trained one. Use the base of the training if this is not intended",
                    stacklevel=4,
                )
        elif name.endswith(VOCABULARY) and name not in needed and _is_in_base(model, ours.get(name), found[name]):
            del found[name]


def _is_in_base(model: Any, name: str | None, copy: DiskTensor) -> bool | None:
    """Whether `copy` is the base's weight `name`, in the smaller of both dtypes; None if the weight is not at hand."""
    module, _, kind = (name or "").rpartition(".")
    weight = getattr(dict(model.named_modules()).get(module), kind, None) if name else None
    is_here = isinstance(weight, torch.Tensor) and not weight.is_meta and not weight.requires_grad
    if rehearsal.current() or not name:
        return list(weight.shape) == copy.shape if isinstance(weight, torch.Tensor) else None
    if is_here and isinstance(weight, torch.Tensor):
        if copy.shape != list(weight.shape):
            return False
        shard, where = local_shard(weight)
        return _are_equal(shard, copy.read(where).to(shard.device))
    on_disk = _base_weight(model, name)
    if on_disk is None:
        return None
    return copy.shape == on_disk.shape and _are_equal(on_disk.read(), copy.read())


def _base_weight(model: Any, name: str) -> DiskTensor | None:
    """The weight `name` in the folder that `model` was opened from, if any."""
    source = getattr(model, "source", None)
    if not source or not Path(source).is_dir():
        return None
    tensors = plain_tensors(Path(source))
    return tensors.get(str(Names.of(model).in_checkpoint(tensors).get(name)))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same in the smaller of the two dtypes: one of them may be rounded."""
    dtype = min(one.dtype, other.dtype, key=lambda each: each.itemsize)
    return torch.equal(one.to(dtype), other.to(dtype))


def adapter_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters of `model` by their names in PEFT's files, in full, in fp32, on the CPU.

    Apart from dtypes, the result equals that of peft's `get_peft_model_state_dict`. All processes must call this, and
    all get the full result.
    """
    return {name: tensor for full in _full_parts(model) for name, tensor in full.items()}


def _full_parts(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of `adapter_state_dict`, one trained parameter at a time."""
    is_tied = _trains_tied_embedding(model)
    for part in _parts(model):
        full = from_its_stage(model, None if part.is_meta else part.full()).to("cpu", torch.float32)
        stored = part.stored(full)
        for name in [*stored]:
            if is_tied and name.endswith("embed_tokens.weight"):  # PEFT expects tied weights twice
                stored[PREFIX + HEAD] = stored[name]
        yield {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in stored.items()}


@checked
def export_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    world: World | None = None,
    base: str | Path = "",
    tokenizer: Tokenizer | None = None,
    task_type: str | None = None,
    card: str = "",
) -> None:
    """Write the adapters of `model`, any module, for PEFT, transformers and vLLM to load on top of the model `base`.

    The config has the settings that the adapters were made with. `base` goes into the config; the default is the folder
    or name that the model was loaded from, if known. `tokenizer` is saved too, with the generation config of `base`.
    `task_type` is PEFT's: by default "CAUSAL_LM" for language models, "SEQ_CLS" for models that score, and null for
    any other, which PEFT then calls as it is. All processes must call this. The folder appears when it is complete.

    Raises:
        TuneError: the model has no adapter, or adapters with settings of which PEFT has only one; a value is not finite
            (raised on all processes); the folder is `base`, or contains files that no export wrote. The folder is then
            unchanged.
    """
    world, folder = current_world(world), Path(folder)
    base = str(base) or _name_of_base(model)
    world.of_main(lambda: _require_other_folder(folder, base))
    config = _config(model, base, task_type)
    if rehearsed := rehearsal.current():
        rehearsed.exported.add(folder)
        return
    tensors: dict[str, torch.Tensor] = {}
    broken: list[str] = []
    for full in _full_parts(model):
        broken += [name.removeprefix(PREFIX) for name, tensor in full.items() if not tensor.isfinite().all()]
        if world.is_main:
            tensors |= full
    require_finite_on_all(world, "adapter", broken, folder)
    if world.is_main:
        header: dict[str, str] = {}
        with suppress(TuneError, OSError):  # a base that cannot be read now must not lose the adapter
            if digest := digest_of_base(base):
                header = {BASE: digest}
        with exported(folder) as unfinished:
            save_tensors(tensors, unfinished / WEIGHTS, "adapter", **header)
            (unfinished / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            if card:
                (unfinished / "README.md").write_text(card, encoding="utf-8")
            if tokenizer is not None:
                generation = Path(base or folder) / GENERATION  # the tokenizer adds its stop tokens to it
                (unfinished / GENERATION).write_text(
                    generation.read_text(encoding="utf-8") if generation.exists() else "{}\n", encoding="utf-8"
                )
                tokenizer.save(unfinished)
    world.barrier()


def _require_other_folder(folder: Path, base: str) -> None:
    """Raise TuneError if an adapter of `base` cannot be written to `folder`."""
    if base and folder.resolve() == Path(base).resolve():
        raise TuneError(f"{folder} is the base of the adapter and would be overwritten. Choose another folder")
    require_replaceable(folder)


def _name_of_base(model: Any) -> str:
    """The folder or hub name that `model` was loaded from, if known, else ""."""
    return getattr(model, "source", None) or getattr(getattr(model, "config", None), "_name_or_path", None) or ""


def load_or_initialize(model: nn.Module, lora: LoRA | None, seed: int) -> None:
    """Load the adapter's files, or initialize a new adapter, which does not yet change what the model computes.

    Does nothing without an adapter. The base must be loaded: some initial values are computed from its weights.
    """
    if lora and lora.path:
        load_adapter(model, lora.path)
    else:
        initialize(model, seed)


def digest(lora: LoRA | None) -> str:
    """A digest of the adapter's files; empty for a new adapter, which does not change the model before training."""
    return " ".join(content_digest(Path(lora.path) / name) for name in (WEIGHTS, CONFIG)) if lora and lora.path else ""


def export_trained(
    model: nn.Module, lora: LoRA | None, folder: Path, *, base: Pretrained, tokenizer: Tokenizer,
    card: str = "", merge: bool = False, world: World | None = None,
) -> None:  # fmt: skip
    """Write the adapter to `folder`/adapter, and with `merge`, or without an adapter, the model to `folder`/model. All
    processes must call this."""
    if lora:
        export_adapter(model, folder / "adapter", world=world, base=base.path, tokenizer=tokenizer, card=card)
    if merge or not lora:
        export(model, tokenizer, folder / "model", world, source=base.path, card=card, base=base if lora else None)


def _config(model: nn.Module, base: str, task_type: str | None) -> dict[str, Any]:
    """PEFT's config of the adapters of `model`."""
    model, names = uncut(model), Names.of(model)
    weights = _adapted_parameters(model)
    adapted: dict[str, Any] = {}
    for name, layer in adapted_modules(model).items():
        in_files = [names.parameter(name)] if name in weights else names.peft_members(name)
        adapted |= dict.fromkeys(in_files, layer)
    layers = {name: layer for name, layer in adapted.items() if isinstance(layer, LowRank)}
    tokens = {name: layer.tokens for name, layer in adapted.items() if isinstance(layer, TokenRows)}
    parameters = {*map(names.parameter, weights)}
    saved = [str(part.on_disk) for part in _parts(model) if not isinstance(part.module, Adapter)]
    whole = {name.removeprefix(PREFIX).rpartition(".")[0] for name in saved}
    lora = _common_settings([layer.settings for layer in layers.values()])
    has_parameters = any(isinstance(layer, LoRAExperts | LoRARouter) for layer in layers.values())
    # With a frozen start the exported rank is twice the trained one, at the same scaling.
    rank_factor = 1 if lora.init == "default" else 2
    alpha_factor = math.sqrt(rank_factor) if lora.rank_stabilized else rank_factor
    return {
        "peft_type": "LORA",
        "task_type": task_type or (SCORES if "score" in whole else _task_of(model)),
        "base_model_name_or_path": base or None,
        "r": lora.rank * rank_factor,
        "lora_alpha": lora.alpha * alpha_factor,
        # PEFT has no dropout for parameters, and refuses to load an adapter with one.
        "lora_dropout": 0.0 if has_parameters else lora.dropout,
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
        "modules_to_save": sorted(whole) or None,
        "trainable_token_indices": tokens or None,
        "ensure_weight_tying": _trains_tied_embedding(model),
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _common_settings(settings: list[LoRA]) -> LoRA:
    """The first of `settings`. Raises TuneError if there are none, or if they differ where PEFT has only one value."""
    if not settings:
        raise TuneError("the model has no adapter to export. Add one with add_adapters(model, LoRA(...))")
    for name in ("rank_stabilized", "dora", "init", "dropout"):
        if len(values := {getattr(each, name) for each in settings}) > 1:
            raise TuneError(f"PEFT supports one {name} for all layers, but this model's layers have {sorted(values)}")
    return settings[0]


def _task_of(model: Any) -> str | None:
    """PEFT's task type of a language model, which must be able to generate. None for any other module."""
    generates = isinstance(model, Decoder | HuggingFaceModel) or hasattr(model, "prepare_inputs_for_generation")
    return "CAUSAL_LM" if generates and not getattr(model.config, "is_encoder_decoder", False) else None


def _shortest(model: nn.Module, adapted: set[str]) -> list[str]:
    """The last parts of the names if they match no other layer, otherwise the full names.

    A part of a larger model keeps full names, since other parts may have layers of the same kinds.
    """
    names = Names.of(model)
    kinds = {name.rpartition(".")[2] for name in adapted}
    modules = {names.peft_module(name) for name, _ in model.named_modules()} | names.stacked_modules()
    matched = {name for name in modules if name.rpartition(".")[2] in kinds}
    is_part = any("language_model." in name for name in adapted)
    return sorted(kinds if matched == adapted and not is_part else adapted)


@dataclass(frozen=True)
class _Part:
    """A trained parameter in PEFT's file. Experts have a tensor each or, if `is_joined`, one tensor for all: A is
    `[experts * rank, in]`, B is `[out, rank * experts]`, with the rows of the B of `second`, if any, at its end."""

    on_disk: OnDisk
    module: nn.Module
    kind: str
    is_joined: bool = False
    second: nn.Module | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [module.get_parameter(self.kind) for module in (self.module, self.second) if module is not None]

    @property
    def is_meta(self) -> bool:
        return self.parameters[0].is_meta

    def full(self) -> torch.Tensor:
        """The full tensor to export: with a frozen start, the factors that include it. All processes must call this."""
        if isinstance(self.module, LowRank) and self.kind != "magnitude" and self.second is None:
            return full_tensor(self.module.factors()[("lora_a", "lora_b").index(self.kind)].detach())
        tensors = [full_tensor(parameter.detach()) for parameter in self.parameters]
        return tensors[0] if self.second is None else torch.cat(tensors, dim=1)

    def empty(self) -> torch.Tensor:
        """A tensor on the meta device of the shape of the trained values."""
        tensors = [torch.empty(parameter.shape, device="meta") for parameter in self.parameters]
        return tensors[0] if self.second is None else torch.cat(tensors, dim=1)

    def stored(self, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of the file that have the values `full`."""
        if self.is_joined:
            full = full.flatten(0, 1) if self.kind == "lora_a" else full.permute(1, 2, 0).flatten(1)
        return dict(disk_parts(self.on_disk, full))

    def load(self, tensors: Mapping[str, DiskTensor]) -> None:
        if not self.is_joined:
            load_shard(self.parameters[0], self.on_disk, tensors)
            return
        (tensor,), experts = tensors.values(), self.parameters[0].shape[0]
        is_a, whole = self.kind == "lora_a", tensor.read()
        stack = whole.unflatten(0, (experts, -1)) if is_a else whole.unflatten(1, (-1, experts)).permute(2, 0, 1)
        for parameter, values in zip(self.parameters, stack.chunk(len(self.parameters), dim=1), strict=True):
            shard, where = local_shard(parameter)
            shard.copy_(values[where])


def _parts(model: nn.Module) -> list[_Part]:
    """All trained parameters; parameters of other pipeline stages are on the meta device."""
    here, model = dict(model.named_modules()), uncut(model)
    names, weights = Names.of(model), _adapted_parameters(model)
    adapted = adapted_modules(model)
    second: dict[nn.Module, str] = {
        layer.first[0]: name for name, layer in adapted.items() if isinstance(layer, LoRASecondExperts)
    }
    parts: dict[nn.Parameter, _Part] = {}
    for name, module in adapted.items():
        modules = [weights[name]] if name in weights else names.peft_members(name)
        for kind, ending in module.PARTS.items():
            parameter = getattr(module, kind)
            if parameter is None or isinstance(module, LoRASecondExperts):  # a part of the first experts' tensor
                continue
            tensors = [f"{PREFIX}{each}.{ending}" for each in modules]
            is_experts = isinstance(module, LoRAExperts)
            after = second.get(module) if kind == "lora_b" else None
            part = _Part(
                tensors if is_experts and name not in weights else tensors[0], here.get(name, module), kind,
                is_experts and name in weights, here.get(after, adapted[after]) if after else None,
            )  # fmt: skip
            parts.setdefault(parameter, part)  # a tied head shares the embedding's rows
    known = {*parts, *(adapted[name].get_parameter("lora_b") for name in second.values())}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in known:
            owner, _, kind = name.rpartition(".")
            parts[parameter] = _Part(
                PREFIX + names.peft_parameter(name), here.get(owner) or model.get_submodule(owner), kind
            )
    return list(parts.values())


def _adapted_parameters(model: nn.Module) -> dict[str, str]:
    """Modules that are adapted as a parameter of their owner in transformers -> their adapters in PEFT's files.

    They are routers, and experts that are one tensor on disk or that `target_parameters` names. PEFT wraps the owner
    once for each of its parameters, the last outermost.
    """
    names = Names.of(model)
    of_parameters: dict[str, str] = {}
    found: dict[str, str] = {}
    for name, layer in reversed(adapted_modules(model).items()):
        parameter = names.parameter(name)
        is_experts = isinstance(layer, LoRAExperts) and (
            names.is_joined(name) or names.is_parameter(name, layer.settings.target_parameters)
        )
        if is_experts or isinstance(layer, LoRARouter):
            wrapped = parameter.rpartition(".")[0]
            while parameter not in of_parameters and wrapped in of_parameters.values():
                wrapped += ".base_layer"
            found[name] = of_parameters.setdefault(parameter, wrapped)
    return found


def _trains_tied_embedding(model: nn.Module) -> bool:
    model = uncut(model)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(embedding.weight.requires_grad and is_tied(model, embedding) for embedding in embeddings)
