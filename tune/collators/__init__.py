"""Rows of samples -> `Batch`: tensors, document boundaries, columns."""

from tune.collators.batch import IGNORE, Batch, Documents, Sample, collate

__all__ = ["IGNORE", "Batch", "Documents", "Sample", "collate"]
