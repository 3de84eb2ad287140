"""The context of a block in addition to hidden states: rotation, documents, positions and cache."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tune.collators import Batch, Documents
from tune.models import attention, flex
from tune.models.rope import Rotation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Place:
    """The place of a forward's tokens in a layer's cache: tokens `kept` (None: all) are written to `written`.

    When decoding, new tokens attend to `read`, with `bias` `[rows, seq, slots]` added to the scores: 0 for visible
    tokens, else -inf.
    """

    written: tuple[Any, ...]
    kept: Tensor | None = None
    read: tuple[slice, ...] = ()
    bias: Tensor | None = None


class LayerCache:
    """Keys and values of one layer `[rows, heads, slots, size]`; position j of a document is in slot j % `slots`.

    With `slots=None`, the states of a recurrent layer, `[rows, ...]`.
    """

    place: Place

    def __init__(self, rows: int, slots: int | None):
        self.rows, self.slots = rows, slots
        self.storage: tuple[Tensor, ...] = ()

    def write(self, *new: Tensor) -> None:
        """Write keys and values of all tokens `[batch, seq, heads, size]`, or the states after each document
        `[documents, ...]`."""
        if not self.storage:
            self.storage = tuple(tensor.new_zeros(self._shape(tensor)) for tensor in new)
        for stored, tensor in zip(self.storage, new, strict=True):
            if self.slots is not None:
                stored, tensor = stored.transpose(1, 2), tensor.flatten(0, 1)
            stored[self.place.written] = tensor if self.place.kept is None else tensor[self.place.kept]

    def _shape(self, tensor: Tensor) -> tuple[int, ...]:
        if self.slots is None:
            return (self.rows, *tensor.shape[1:])
        return (self.rows, tensor.shape[2], self.slots, tensor.shape[3])

    def read(self) -> tuple[Tensor, ...]:
        """Keys and values `[rows, heads, slots, size]`, or states, of the rows in use."""
        return tuple(stored[self.place.read] for stored in self.storage)


class KeyValueCache:
    """The cache of all layers for `rows` documents of at most `capacity` tokens.

    `windows` has the window of each layer: `capacity` if it attends to all tokens, None if it is recurrent. Call
    `start` or `extend` before each forward, to announce its tokens.
    """

    def __init__(self, windows: Sequence[int | None], rows: int, capacity: int):
        self.layers = [LayerCache(rows, None if window is None else min(window, capacity)) for window in windows]

    def start(self, rows: list[int], batch: Batch, device: torch.device) -> None:
        """Announce the documents of `batch`, which is one row on the host. Each document becomes one of `rows`."""
        lengths = np.array(batch.documents.lengths)
        row, position, ends = np.repeat(rows, lengths), batch.positions[0].numpy(), np.repeat(lengths, lengths)

        def place(slots: int) -> Place:
            kept = np.flatnonzero(position >= ends - slots)  # the last tokens of each document
            tokens, *written = (torch.from_numpy(each).to(device) for each in (kept, row[kept], position[kept] % slots))
            return Place(tuple(written), tokens)

        self._set_places(Place((torch.tensor(rows, device=device),)), place)

    def extend(self, positions: Tensor, length: int) -> None:
        """Announce tokens at `positions` `[rows, seq]` of rows 0, 1, ...; see `together`.

        No row may be longer than `length` afterwards. Does not wait for the device, since it does not read positions.
        """
        count, device = len(positions), positions.device
        row = torch.arange(count, device=device).repeat_interleave(positions.shape[1])

        def place(slots: int) -> Place:
            used = min(length, slots)
            later = torch.arange(used, device=device) > positions[..., None]
            bias = torch.zeros(later.shape, device=device).masked_fill_(later, -math.inf)
            read = slice(count), slice(None), slice(used)
            return Place((row, positions.flatten() % slots), read=read, bias=bias)

        self._set_places(Place((slice(count),), read=(slice(count),)), place)

    def _set_places(self, of_states: Place, of_slots: Callable[[int], Place]) -> None:
        of_slots = functools.cache(of_slots)  # most layers have equally many slots
        for layer in self.layers:
            layer.place = of_states if layer.slots is None else of_slots(layer.slots)

    def together(self, start: int) -> int:
        """The number of tokens from position `start` on that fit in one forward, before a window drops tokens that they
        attend to."""
        return max(1, min((layer.slots for layer in self.layers if layer.slots is not None), default=start) - start)

    def keeps_all(self, length: int) -> bool:
        """Whether the end of a document of `length` tokens can be replaced, since no window or state has dropped a
        token."""
        return all(layer.slots is not None and length <= layer.slots for layer in self.layers)

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows: `moves` has pairs (source, target)."""
        if moves:
            source, target = (list(rows) for rows in zip(*moves, strict=True))
            for stored in (stored for layer in self.layers for stored in layer.storage):
                stored[target] = stored[source]


class Masks:
    """The masks for FlexAttention in a forward of `rows` x `seq` tokens, each made once for all layers."""

    def __init__(self, documents: Documents | None, shape: torch.Size, device: torch.device, dtype: torch.dtype):
        self.documents, self.shape, self.device, self.dtype = documents, shape, device, dtype
        self.made: dict[int | None, BlockMask] = {}

    def of(self, config: Any) -> "BlockMask | None":
        """The mask for a layer with this attention config; None if FlexAttention does not compute it."""
        choose = getattr(config, "path", None)
        if choose is None or choose(attention.capability(self.device), self.dtype).path != "flex":
            return None
        window = config.window
        if window not in self.made:
            self.made[window] = flex.block_mask(self.documents, window, self.shape, self.device)
        mask = self.made[window]
        return mask if torch.compiler.is_compiling() or flex.runs(mask, config, self.dtype) else None


@dataclass(frozen=True)
class Context:
    """`rotation`, `cache` and `mask` (for FlexAttention) belong to the block; the rest is the same for all blocks.
    `documents=None` means one document per row."""

    rotation: Rotation | None
    documents: Documents | None
    positions: Tensor
    cache: LayerCache | None
    mask: "BlockMask | None" = None
