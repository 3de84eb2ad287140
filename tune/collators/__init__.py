"""Samples to batches of tensors."""

from tune.collators.batch import IGNORE, Batch, Sample, collate

__all__ = ["IGNORE", "Batch", "Sample", "collate"]
