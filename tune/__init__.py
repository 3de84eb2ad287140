"""Copy-and-hack recipes for fine-tuning language models with PyTorch."""

import logging

__version__ = "0.1.0"

# What is said when torchao is imported is for its developers: of kernels for other machines, and of its own enums.
logging.getLogger("torchao").addFilter(lambda record: record.levelno > logging.WARNING)
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.msg)
