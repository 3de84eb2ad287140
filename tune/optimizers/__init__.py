"""Parameter groups and schedules. Optimizers are torch's and torchao's, named in the config as they are."""

from tune.optimizers.adafactor import Adafactor
from tune.optimizers.groups import parameter_groups
from tune.optimizers.muon import Muon
from tune.optimizers.schedules import constant, cosine, inverse_square_root, linear, warmup_stable_decay

__all__ = [
    "Adafactor",
    "Muon",
    "constant",
    "cosine",
    "inverse_square_root",
    "linear",
    "parameter_groups",
    "warmup_stable_decay",
]
