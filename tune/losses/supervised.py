"""Find the supervised tokens of a Batch, of labels or of a mask."""

import torch
from torch import Tensor

from tune.collators import IGNORE, Batch
from tune.errors import TuneError

Labels = Batch | Tensor
"""A Batch, whose supervised tokens are known on the host, or shifted integer labels `[rows, seq]` with -100 for
unsupervised tokens. Finding the supervised tokens of labels on a GPU synchronizes with the device once."""


def label_ids(labels: Labels) -> Tensor:
    """Return the labels as a tensor, `[rows, seq]`."""
    if isinstance(labels, Batch):
        return labels.labels
    if not isinstance(labels, Tensor):
        raise TuneError(f"labels: expected a tensor [rows, seq] or a tune.collators.Batch, got {type(labels).__name__}")
    return labels


def supervised_places(labels: Labels) -> Tensor:
    """Return the indices of the supervised tokens in the flattened `labels`, int64 `[tokens]`. For a mask (bool), these
    are the true elements."""
    if isinstance(labels, Batch):
        return labels.supervised
    if labels.dtype.is_floating_point:
        raise TuneError(f"labels: must be ids (integers) or a mask (bool), got {labels.dtype}")
    is_supervised = labels if labels.dtype == torch.bool else labels != IGNORE
    return is_supervised.flatten().nonzero()[:, 0]


def of_supervised(values: Tensor, labels: Labels, name: str = "values") -> Tensor:
    """Select `values` `[rows, seq, ...]` at supervised tokens, `[tokens, ...]`. Raises TuneError, naming `name`, if
    shapes do not match."""
    require_tokens(name, values, labels)
    return values.flatten(0, label_ids(labels).ndim - 1).index_select(0, supervised_places(labels))


def supervised_weights(labels: Labels) -> Tensor | None:
    """Return the loss weights of supervised tokens, fp32 `[tokens]`, or None if all are equal. Only a Batch has
    weights."""
    if not isinstance(labels, Batch) or labels.weights is None:
        return None
    return labels.weights.flatten().index_select(0, labels.supervised)


def documents_of(labels: Labels) -> tuple[Tensor, int]:
    """Return the document of each supervised token, int64 `[tokens]`, and the number of documents. Documents are those
    of a Batch, or the rows of labels or of a mask `[rows, seq]`."""
    if isinstance(labels, Batch):
        return of_supervised(labels.documents.ids, labels), len(labels.documents.lengths)
    ids = label_ids(labels)
    if ids.ndim != 2:
        raise TuneError(f"labels: shape must be [rows, seq] with one document per row, got {[*ids.shape]}")
    return supervised_places(labels) // max(1, ids.shape[1]), len(ids)


def require_tokens(name: str, values: Tensor, labels: Labels) -> None:
    """Raise TuneError if `values` `[rows, seq, ...]` do not have the rows and tokens of the labels."""
    shape = label_ids(labels).shape
    if values.shape[: len(shape)] != shape:
        raise TuneError(
            f"labels: shape {[*shape]} does not match {name} {[*values.shape]}: both need the same rows and tokens"
        )


def require_equal_shapes(**tensors: object) -> None:
    """Raise TuneError, naming the first mismatch, unless all are tensors with the shape of the first."""
    (first, expected), *_ = tensors.items()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TuneError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if isinstance(expected, Tensor) and tensor.shape != expected.shape:
            raise TuneError(f"{name}: shape {[*tensor.shape]} differs from {first} {[*expected.shape]}")


def require_vectors(hint: str = "", /, **tensors: object) -> None:
    """Raise TuneError, ending with `hint`, unless all are one-dimensional tensors of one length."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.ndim != 1:
            raise TuneError(f"{name}: must have one dimension, got shape {[*tensor.shape]}. {hint}".rstrip())
    require_equal_shapes(**tensors)
