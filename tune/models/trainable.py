"""The interface of models for recipes, checkpointers, adapters and exporters."""

from typing import Any, Protocol

from torch import Tensor

from tune.collators import Batch
from tune.models.decoder import Head
from tune.models.names import Names
from tune.models.routing import RoutingSums


class TrainableModel(Protocol):
    """`Decoder` and `HuggingFaceModel` implement all of it.

    A module of your own needs `config.vocab_size`, `__call__` and an `nn.ModuleList` of blocks. Without `names`, names
    on disk are those of `state_dict()`; without `max_positions`, documents may have any length; without `routing`, no
    statistics of experts are logged.
    """

    config: Any
    names: Names
    routing: RoutingSums | None

    @property
    def max_positions(self) -> int | None:
        """The length of documents that the model was trained for."""

    def __call__(self, batch: Batch | Tensor, head: Head | None = None) -> Any:
        """Returns `head(hidden, weight, batch)`, or without a head logits `[rows, seq, vocab]`."""
