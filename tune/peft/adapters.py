"""Adding adapters to a model."""

import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from tune.distributed import local_shard
from tune.errors import TuneError
from tune.models.names import Names
from tune.peft.lora import KINDS, LoRA, LoRAExperts, LowRank
from tune.peft.targets import adapted_layers, modules_to_save, token_modules
from tune.peft.tokens import TokenEmbedding, TokenHead, TokenRows

# Both have `PARTS` (their trained parameters, with the ends of the names in PEFT's files) and `initial_values`.
Adapter: TypeAlias = LowRank | TokenRows


@dataclass(frozen=True)
class Adapted:
    """The result of `add_adapters`: by name, adapted modules and those trained in full; numbers of parameters."""

    layers: dict[str, Adapter]
    whole: dict[str, nn.Module]
    trainable: int
    total: int

    def table(self) -> str:
        """A line for each kind of layer."""
        kinds: dict[str, list[nn.Module]] = {}
        for name, layer in {**self.layers, **self.whole}.items():
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(layer)
        share, width = f"{self.trainable / self.total:.2%}", max(map(len, kinds)) + 2
        lines = [f"adapters: {self.trainable:,} of {self.total:,} parameters are trained ({share})"]
        for kind, layers in kinds.items():
            lines.append(f"  {kind:<{width}}x {len(layers):<4} {', '.join(sorted({_how(layer) for layer in layers}))}")
        return "\n".join(lines)


def add_adapters(model: nn.Module, lora: LoRA) -> Adapted:
    """Freeze `model`, any module, and give the layers that `lora` targets an adapter, in place.

    On the meta device the adapters are undefined until `initialize`; elsewhere they are initialized here, and the model
    computes what it did before. A layer narrower than the rank gets the largest rank that fits.

    Raises:
        TuneError: a name matches no layer, or one that cannot be adapted.
    """
    names = Names.of(model)
    try:
        targets = adapted_layers(model, lora)
        whole = modules_to_save(model, lora, targets)
        token_rows = token_modules(model, lora, {**targets, **whole})
    except TuneError as error:
        if lora.path is None:
            raise
        reason = str(error).partition(". ")[0].removeprefix("adapter.")  # the rest is for whoever chose the targets
        instead = "Take the model that it was trained on, or another adapter"
        raise TuneError(f"adapter.path: {lora.path} does not fit this model: {reason}. {instead}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
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
    if token_rows is not None:
        embedding, head = token_rows
        tied_to = TokenEmbedding.adapt(embedding, lora.trainable_tokens)
        if head is not None:
            TokenHead.adapt(head, lora.trainable_tokens, tied_to if head.weight is embedding.weight else None)
    if lora.dropout:  # a token that documents share would have the mask of one of them
        model.shares_prefixes = False  # type: ignore[assignment]
    for module in whole.values():
        module.requires_grad_(True)
    if not next(model.parameters()).is_meta:
        initialize(model, seed=0)
    elif lora.path:
        from tune.peft.files import load_adapter  # which needs this module

        load_adapter(model, lora.path)  # its names and shapes alone
    parameters = list(model.parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return Adapted(adapted_modules(model), whole, trainable, sum(parameter.numel() for parameter in parameters))


def adapted_modules(model: nn.Module) -> dict[str, Adapter]:
    """The modules that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


def initialize(model: nn.Module, seed: int) -> None:
    """Initialize new adapters, with the same values in any layout. The base must be loaded; all processes must call."""
    with torch.no_grad():
        for name, layer in adapted_modules(model).items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            for part, full in layer.initial_values(generator).items():
                shard, where = local_shard(getattr(layer, part))
                shard.copy_(full[where])


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model computes what its base does, in evaluation. Parameters that are trained in full stay as they are."""
    layers = [layer for layer in adapted_modules(model).values() if isinstance(layer, LowRank)]
    was_training = model.training
    model.eval()
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        model.train(was_training)
        for layer in layers:
            layer.is_off = False


def _largest_rank(layer: nn.Module) -> int:
    """Of a linear layer, its width; embeddings and experts take any rank."""
    return min(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else sys.maxsize


def _how(layer: Any) -> str:
    if isinstance(layer, TokenRows):
        return f"{len(layer.tokens)} tokens"
    if not isinstance(layer, LowRank):
        return "trained in full"
    if isinstance(layer, LoRAExperts):
        return f"rank {layer.rank} for each of {layer.num_experts} experts"
    return f"rank {layer.rank}" + (" (the layer's width)" if layer.rank == _largest_rank(layer) else "")
