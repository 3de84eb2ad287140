"""Data files to tokenised, packed and counted samples, and their order in training."""

from tune.collators import Sample
from tune.datasets.accounting import Accounting
from tune.datasets.dataset import Dataset
from tune.datasets.from_path import load
from tune.datasets.loader import DataLoader, GlobalBatch, validation_batches
from tune.datasets.mix import Mixture, mix
from tune.datasets.packing import pack
from tune.datasets.rows import Outcome, RowReader
from tune.datasets.stream import Stream

__all__ = [
    "Accounting",
    "DataLoader",
    "Dataset",
    "GlobalBatch",
    "Mixture",
    "Outcome",
    "RowReader",
    "Sample",
    "Stream",
    "load",
    "mix",
    "pack",
    "validation_batches",
]
