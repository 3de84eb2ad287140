"""Samples to batches of tensors."""

from tune.collators.batch import IGNORE, Batch, Documents, Sample, collate

__all__ = ["IGNORE", "Batch", "Documents", "Sample", "collate"]
