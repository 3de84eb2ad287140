"""Copy-and-hack recipes for fine-tuning language models with PyTorch."""

__version__ = "0.1.0"
