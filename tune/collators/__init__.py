"""Collate rows of samples into a `Batch` (tensors, document boundaries, columns) or inputs of a transformers model."""

from tune.collators.batch import (
    IGNORE,
    Batch,
    Documents,
    Part,
    Picture,
    Pictures,
    Pixels,
    Sample,
    collate,
    shift_labels,
)
from tune.collators.inputs import collate_inputs

__all__ = [
    "IGNORE",
    "Batch",
    "Documents",
    "Part",
    "Picture",
    "Pictures",
    "Sample",
    "collate",
    "collate_inputs",
    "shift_labels",
]
