"""Rows of samples -> `Batch`: tensors, document boundaries, columns; or the inputs of a model of transformers."""

from tune.collators.batch import IGNORE, Batch, Documents, Part, Sample, collate, shift_labels
from tune.collators.inputs import collate_inputs

__all__ = ["IGNORE", "Batch", "Documents", "Part", "Sample", "collate", "collate_inputs", "shift_labels"]
