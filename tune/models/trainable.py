"""What recipes, checkpointers, adapters and exporters ask of a model."""

from typing import Any, Protocol

from torch import Tensor

from tune.collators import Batch
from tune.models.decoder import Head
from tune.models.names import Names
from tune.models.routing import RoutingSums


class TrainableModel(Protocol):
    """`Decoder` and `HuggingFaceModel` have all of this.

    A module of your own needs `config.vocab_size`, the call and an `nn.ModuleList` of blocks. Without `names` it is on
    disk as its `state_dict()` names it, without `max_positions` its rows may have any length, and without `routing` it
    has no experts to report on.
    """

    config: Any
    names: Names
    routing: RoutingSums | None

    @property
    def max_positions(self) -> int | None:
        """The length of documents that the model was made for."""

    def __call__(self, batch: Batch | Tensor, head: Head | None = None) -> Any:
        """What `head` makes of hidden states, output weight and batch; without a head, logits `[rows, seq, vocab]`."""
