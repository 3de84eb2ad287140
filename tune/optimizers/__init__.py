"""Learning rate schedules. Optimizers are torch's and torchao's, named in the config as they are."""

from tune.optimizers.schedules import constant, cosine, linear

__all__ = ["constant", "cosine", "linear"]
