"""Rows from files, from the Hugging Face hub and from functions, each with its place for messages."""

from tune.datasets.sources.files import File
from tune.datasets.sources.readers import Rows
from tune.datasets.sources.source import Source, open_source

__all__ = ["File", "Rows", "Source", "open_source"]
