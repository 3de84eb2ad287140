"""Rows from files, from the Hugging Face hub and from functions, each with its place for messages."""

from tune.datasets.sources.data_files import File
from tune.datasets.sources.opening import Source, open_source

__all__ = ["File", "Source", "open_source"]
