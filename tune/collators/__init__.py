"""Rows of samples -> `Batch`: tensors, document boundaries, columns."""

from tune.collators.batch import IGNORE, Batch, Documents, Part, Sample, collate, shift_labels

__all__ = ["IGNORE", "Batch", "Documents", "Part", "Sample", "collate", "shift_labels"]
