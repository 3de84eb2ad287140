"""Copy-and-hack recipes for fine-tuning language models with PyTorch."""

import logging

__version__ = "0.1.0"

# torchao warns its developers when it is imported: about kernels for other machines and about its enums.
logging.getLogger("torchao").addFilter(lambda record: record.levelno > logging.WARNING)
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.msg)
