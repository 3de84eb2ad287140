"""A document as a sample, and rows of documents as a batch of tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

IGNORE = -100
"""The label of a position that is not supervised."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A document's token ids, and the id to predict at each position (`tokens[i + 1]`, or -100). int32 `[length]`."""

    tokens: np.ndarray
    labels: np.ndarray
    index: int = 0  # which sample of its dataset it is


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """int64 tensors `[rows, seq]`. Padding is a document of its own, with label -100."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor  # from 0 in each document
    documents: torch.Tensor  # which document of its row a token belongs to, from 0; attention stays inside
    samples: torch.Tensor  # which sample of the dataset that document is
    num_tokens: int  # without padding
    num_supervised: int

    def to(self, device: torch.device | str) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> "Batch":
        return self._each(torch.Tensor.pin_memory)

    def _each(self, function: Callable[[torch.Tensor], Any]) -> "Batch":
        names = ("tokens", "labels", "positions", "documents", "samples")
        return replace(self, **{name: function(getattr(self, name)) for name in names})


def collate(rows: list[list[Sample]], pad_to: int | None = None) -> Batch:
    """A batch of rows of documents. A row may have none (it fills up a batch).

    `pad_to=None` joins all rows into one, `[1, total]`, without padding: documents do not see each other anyway.
    Otherwise the batch is `[len(rows), pad_to]`.
    """
    if pad_to is None:
        rows = [[document for row in rows for document in row]]
        pad_to = max(1, sum(len(document.tokens) for document in rows[0]))
    tokens, labels, positions, documents, samples = np.zeros((5, len(rows), pad_to), dtype=np.int64)
    labels.fill(IGNORE)
    num_tokens = 0
    for index, row in enumerate(rows):
        end = 0
        for number, document in enumerate(row):
            start, end = end, end + len(document.tokens)
            tokens[index, start:end] = document.tokens
            labels[index, start:end] = document.labels
            positions[index, start:end] = np.arange(end - start)
            documents[index, start:end] = number
            samples[index, start:end] = document.index
        positions[index, end:] = np.arange(pad_to - end)
        documents[index, end:] = len(row)
        num_tokens += end
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(positions),
        torch.from_numpy(documents),
        torch.from_numpy(samples),
        num_tokens=num_tokens,
        num_supervised=int((labels != IGNORE).sum()),
    )
