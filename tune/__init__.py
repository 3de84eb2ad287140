"""Copy-and-hack recipes for fine-tuning language models with PyTorch."""

from tune.errors import TuneError

__version__ = "0.1.0"
__all__ = ["TuneError"]
