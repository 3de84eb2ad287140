"""The base of an adapter with it merged in. Several adapters become one as in PEFT."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tune import distributed
from tune.checkpointers import Pretrained, card, export, name_of, open_checkpoint
from tune.errors import TuneError
from tune.models import ConfigFile, Names
from tune.peft.adapters import adapted_modules
from tune.peft.adding import add_adapters
from tune.peft.files import load_adapter, load_parameters, read_adapter
from tune.peft.lora import LoRALinear
from tune.tokenizers import Tokenizer


def merge(base: str | Path, adapter: str | Path | Sequence[str | Path], out: str | Path, **combination: Any) -> None:
    """Write to `out` the model `base` with `adapter` merged in, with the names and types of the base.

    The tokenizer is that of the adapter's folder, if it has one. The adapter and one tensor of the base are in
    memory. Adapters are merged in fp32. Several become one first, see `load_combined` for the `combination`. `out`
    appears, or is replaced, when it is complete.

    Raises:
        TuneError: layers or shapes of the adapter do not fit the base; the base is quantised.
    """
    source, adapters = Path(base), [Path(each) for each in ([adapter] if isinstance(adapter, str | Path) else adapter)]
    model, weights, tokenizer = open_on_disk(source, *adapters, **combination)
    names = ", ".join(f"`{'/'.join(each.parts[-2:])}`" for each in adapters)
    what = f"adapter {names} merged" if len(adapters) == 1 else f"adapters {names} merged ({combination['method']})"
    text = card(source, f"`{name_of(source)}` with the {what} in by tune.")
    export(model, tokenizer, out, distributed.init("cpu"), source=str(source), card=text, base=weights)


@torch.no_grad()
def merge_in_place(model: nn.Module) -> None:
    """Merge the adapters of `model` into its weights in memory, in fp32 and one at a time. The adapted modules are the
    plain ones again; nothing of the model requires a gradient that did not before.

    Raises:
        TuneError: it has no adapter, or adapted weights that are quantized or sharded: `export` with the original
            weights as `base`, or `merge` of files, can merge these. The model is unchanged.
    """
    layers: dict[str, Any] = dict(adapted_modules(model))
    if not layers:
        raise TuneError("the model has no adapter to merge")
    for name, layer in layers.items():
        if not isinstance(layer.weight, Tensor):
            raise TuneError(f"{name} is quantized, and a merged weight would be rounded. Merge into the original model")
        if isinstance(layer.weight, DTensor):
            raise TuneError(f"{name} is sharded: its adapter cannot be taken off. tune.checkpointers.export merges it")
    for layer in layers.values():
        layer.weight.copy_(layer.merged(layer.weight))
        layer.remove()
    vars(model).pop("has_dropout", None)


def open_on_disk(
    source: Path, adapter: Path | None = None, *more: Path, **combination: Any
) -> tuple[Any, Pretrained, Tokenizer | None]:
    """The model `source` without memory but for the adapter, its weights, and the adapter's tokenizer, if it has one.
    Raises TuneError as `merge` does."""
    lora = read_adapter(str(adapter)) if adapter else None
    scores = (lora and "score" in lora.modules_to_save) or ConfigFile(source).scores
    head: Literal["tokens", "score"] = "score" if scores else "tokens"
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


@torch.no_grad()
def load_combined(
    model: Any, adapters: list[Path], method: str, weights: Sequence[float] = (), density: float = 0.5, seed: int = 0
) -> None:
    """Load into `model`, which has the layers of the first of the `adapters`, what they make together. For each layer,
    its A matrices and its B matrices are summed, times the root of weight and scaling (`linear`).

    `ties` (Yadav et al., 2023) keeps of each matrix only the share `density` of largest values, and of each element the
    mean of those that have the sign of their sum; `dare_linear` and `dare_ties` (Yu et al., 2024) keep a share by
    chance, divided by it. Weights are one by default.

    Raises:
        TuneError: the adapters differ in layers or ranks, or have more than low-rank matrices of linear layers.
    """
    layers: dict[str, Any] = dict(adapted_modules(model))
    if weights and len(weights) != len(adapters):
        raise TuneError(f"there are {len(weights)} weights for {len(adapters)} adapters: give one for each")
    if not all(map(math.isfinite, weights)):
        raise TuneError(f"the weights {', '.join(map(str, weights))} are not all finite")
    if not 0 < density <= 1:
        raise TuneError(f"a density of {density} is no share: it is above 0 and at most 1")
    factors: dict[str, list[tuple[Tensor, Tensor, float]]] = {name: [] for name in layers}
    for folder, weight in zip(adapters, weights or [1.0] * len(adapters), strict=True):
        lora = read_adapter(str(folder))
        if lora.dora or lora.modules_to_save or not all(isinstance(layer, LoRALinear) for layer in layers.values()):
            raise TuneError(f"{folder} has more than LoRA's matrices of linear layers: it cannot be one of several")
        load_parameters(model, folder)
        for name, layer in layers.items():
            _, alpha = lora.at(*Names.of(model).spellings(name))
            share = weight * lora.scaling(layer.rank, alpha)
            factors[name].append((layer.lora_a.clone(), layer.lora_b.clone(), share))
    torch.manual_seed(seed)
    for name, layer in layers.items():
        all_a, all_b, shares = zip(*factors[name], strict=True)
        roots = torch.tensor([math.sqrt(abs(share)) for share in shares])
        signs = torch.tensor([math.copysign(1, share) for share in shares])
        layer.lora_a.copy_(_combined(all_a, roots * signs, method, density))
        layer.lora_b.copy_(_combined(all_b, roots, method, density))
        layer.scaling = 1.0


def _combined(tensors: Sequence[Tensor], weights: Tensor, method: str, density: float) -> Tensor:
    kept = []
    for tensor in tensors:
        if method.startswith("dare"):
            tensor = tensor * torch.bernoulli(torch.full_like(tensor, density)) / density
        elif method == "ties":
            mask = torch.zeros(tensor.numel())
            mask[tensor.abs().flatten().topk(int(density * tensor.numel())).indices] = 1
            tensor = tensor * mask.view_as(tensor)
        kept.append(tensor)
    stack, weights = torch.stack(kept), weights.view(-1, 1, 1)
    if method.endswith("linear"):
        return (stack * weights).sum(dim=0)
    agrees = stack.sign() == torch.where(stack.sum(dim=0) >= 0, 1, -1)
    return (stack * weights * agrees).sum(dim=0) / agrees.sum(dim=0).clamp(min=1)
