"""The adapters of a model: finding, initializing and switching them off."""

import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

from tune import rehearsal
from tune.distributed import local_shard
from tune.peft.lora import LowRank
from tune.peft.tokens import TokenRows

# Both have `PARTS` (their trained parameters, with the ends of the names in PEFT's files) and `initial_values`.
Adapter: TypeAlias = LowRank | TokenRows


def adapted_modules(model: nn.Module) -> dict[str, Adapter]:
    """The modules that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


def initialize(model: nn.Module, seed: int, earlier: Collection[str] = ()) -> None:
    """Initialize the adapters of `model`, without those of the modules named in `earlier`, with the same values in any
    layout. The base must be loaded; all processes must call."""
    if rehearsal.current():
        return
    with torch.no_grad():
        for name, layer in adapted_modules(model).items():
            if name in earlier:
                continue
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


def is_tied(model: nn.Module, layer: nn.Module) -> bool:
    """Whether embedding and head share the weight of `layer`, which is one of them."""
    if isinstance(layer, nn.Embedding) and getattr(getattr(model, "config", None), "tied_head", False):
        return True
    sharing = [module for module in model.modules() if getattr(module, "weight", None) is layer.weight]
    return len(sharing) > 1 and any(isinstance(module, nn.Embedding) for module in sharing)
