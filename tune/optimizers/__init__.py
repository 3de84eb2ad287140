"""Parameter groups, schedules, updates in backward; Muon and Adafactor, which torch only has for unsharded parameters.

All other optimizers are used directly from torch and torchao.
"""

from tune.optimizers.groups import learning_rates, parameter_groups
from tune.optimizers.schedules import constant, cosine, inverse_square_root, linear, warmup_stable_decay
from tune.optimizers.updates import Adafactor, InBackward, Muon
