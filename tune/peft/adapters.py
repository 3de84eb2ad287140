"""Find, initialize and switch off the adapters of a model."""

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

# Both have `PARTS` (trained parameters -> end of their names in PEFT's files) and `initial_values`.
Adapter: TypeAlias = LowRank | TokenRows


def adapted_modules(model: nn.Module) -> dict[str, Adapter]:
    """The modules with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


def initialize(model: nn.Module, seed: int, earlier: Collection[str] = ()) -> None:
    """Initialize the adapters of `model`, except on the modules in `earlier`, with the same values in any layout.

    The base must be loaded. All processes must call this.
    """
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


def trained_in_full(model: nn.Module) -> list[str]:
    """The names of the trained parameters that are not an adapter's, and that `switched_off` leaves as they are."""
    adapters = adapted_modules(model).values()
    own = {id(getattr(layer, part, None)) for layer in adapters for part in layer.PARTS}
    return [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in own]


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """A context in which the model computes without its adapters, in evaluation mode. Parameters that are trained in
    full keep their values, so that it is the base only if `trained_in_full` is empty."""
    layers = adapted_modules(model).values()
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
    """Whether `layer`, the embedding or the head, shares its weight with the other."""
    if isinstance(layer, nn.Embedding) and getattr(getattr(model, "config", None), "tied_head", False):
        return True
    sharing = [module for module in model.modules() if getattr(module, "weight", None) is layer.weight]
    return len(sharing) > 1 and any(isinstance(module, nn.Embedding) for module in sharing)
