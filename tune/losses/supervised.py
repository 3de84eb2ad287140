"""Which tokens are supervised: a Batch says it, or its labels as a tensor, or a mask."""

import torch
from torch import Tensor

from tune.collators import IGNORE, Batch
from tune.errors import TuneError

Labels = Batch | Tensor
"""A Batch, whose supervised tokens are known on the host, or labels `[rows, seq]`: already shifted, int, -100 where
nothing is supervised. Finding the supervised tokens of labels on a GPU waits for the device once."""


def label_ids(labels: Labels) -> Tensor:
    """The labels as a tensor, `[rows, seq]`."""
    if isinstance(labels, Batch):
        return labels.labels
    if not isinstance(labels, Tensor):
        raise TuneError(f"labels: a {type(labels).__name__} is neither a tensor [rows, seq] nor a tune.collators.Batch")
    return labels


def supervised_places(labels: Labels) -> Tensor:
    """The indices of the supervised tokens into the flattened `labels`, int64 `[tokens]`. Of a mask (bool) these are
    the tokens where it is true."""
    if isinstance(labels, Batch):
        return labels.supervised
    if labels.dtype.is_floating_point:
        raise TuneError(f"labels: they are {labels.dtype}; they must be ids (integers), or a mask (bool)")
    is_supervised = labels if labels.dtype == torch.bool else labels != IGNORE
    return is_supervised.flatten().nonzero()[:, 0]


def of_supervised(values: Tensor, labels: Labels, name: str = "values") -> Tensor:
    """The rows of `values` `[rows, seq, ...]` at supervised tokens, `[tokens, ...]`. `name` is for the TuneError that
    is raised where shapes do not fit."""
    require_tokens(name, values, labels)
    return values.flatten(0, label_ids(labels).ndim - 1).index_select(0, supervised_places(labels))


def supervised_weights(labels: Labels) -> Tensor | None:
    """How much the loss of each supervised token counts, fp32 `[tokens]`; None: all alike. Only a Batch has weights."""
    if not isinstance(labels, Batch) or labels.weights is None:
        return None
    return labels.weights.flatten().index_select(0, labels.supervised)


def documents_of(labels: Labels) -> tuple[Tensor, int]:
    """The document of each supervised token, int64 `[tokens]`, and the number of documents: those of a Batch, or the
    rows of labels or of a mask `[rows, seq]`."""
    if isinstance(labels, Batch):
        return of_supervised(labels.documents.ids, labels), len(labels.documents.lengths)
    ids = label_ids(labels)
    if ids.ndim != 2:
        raise TuneError(f"labels: their shape is {[*ids.shape]}; it must be [rows, seq], each row a document")
    return supervised_places(labels) // max(1, ids.shape[1]), len(ids)


def require_tokens(name: str, values: Tensor, labels: Labels) -> None:
    """Raise TuneError if `values` are not `[rows, seq, ...]` with the rows and tokens of the labels."""
    shape = label_ids(labels).shape
    if values.shape[: len(shape)] != shape:
        raise TuneError(
            f"labels: their shape is {[*shape]}, and that of {name} {[*values.shape]}: they must have the same rows "
            "and tokens"
        )


def require_equal_shapes(**tensors: object) -> None:
    """Raise TuneError, which names the first wrong one, unless all are tensors of the shape of the first."""
    (first, expected), *_ = tensors.items()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TuneError(f"{name}: a {type(tensor).__name__} is no tensor")
        if isinstance(expected, Tensor) and tensor.shape != expected.shape:
            raise TuneError(f"{name}: the shape is {[*tensor.shape]}, and that of {first} {[*expected.shape]}")


def require_vectors(hint: str = "", /, **tensors: object) -> None:
    """Raise TuneError, which ends with `hint`, unless all are tensors of one dimension and one length."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.ndim != 1:
            raise TuneError(f"{name}: the shape is {[*tensor.shape]}; it must have one dimension. {hint}".rstrip())
    require_equal_shapes(**tensors)
