"""What a forward of the decoder tells its blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tune.collators import Documents
from tune.models.rope import Rotation


class LayerCache:
    """Keys and values of the tokens that one layer has seen: slot j of a row holds its position j. Or, of a recurrent
    layer, its state."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.storage: tuple[Tensor, ...] = ()

    def update(self, *new: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Put `new` tensors `[batch, new, heads, size]` at `positions` `[batch, new]`; all slots of each."""
        if not self.storage:
            self.storage = tuple(tensor.new_zeros(len(tensor), self.capacity, *tensor.shape[2:]) for tensor in new)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        for slots, tensor in zip(self.storage, new, strict=True):
            slots[rows, positions] = tensor
        return self.storage


class KeyValueCache:
    """A cache for each of `num_layers` layers, with room for `capacity` tokens a row."""

    def __init__(self, num_layers: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]


@dataclass(frozen=True)
class Context:
    """`rotation` and `cache` are the block's own; the rest is the same for all. Without `documents` a row is one."""

    rotation: Rotation | None
    documents: Documents | None
    positions: Tensor
    cache: LayerCache | None
