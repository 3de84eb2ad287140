"""What a block gets beside hidden states: rotation, documents, positions and cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tune.collators import Documents
from tune.models.rope import Rotation


class LayerCache:
    """Keys and values of one layer, with position j of a row in slot j; or the state of a recurrent layer."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.storage: tuple[Tensor, ...] = ()

    def update(self, *new: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Write `new` tensors `[batch, new, heads, size]` at `positions` `[batch, new]`. Returns all slots of each."""
        if not self.storage:
            self.storage = tuple(tensor.new_zeros(len(tensor), self.capacity, *tensor.shape[2:]) for tensor in new)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        for slots, tensor in zip(self.storage, new, strict=True):
            slots[rows, positions] = tensor
        return self.storage


class KeyValueCache:
    """A `LayerCache` for each layer, for `capacity` tokens per row."""

    def __init__(self, num_layers: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]


@dataclass(frozen=True)
class Context:
    """`rotation` and `cache` belong to the block, the rest is the same for all. `documents=None`: one per row."""

    rotation: Rotation | None
    documents: Documents | None
    positions: Tensor
    cache: LayerCache | None
