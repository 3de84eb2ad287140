"""Parameter groups, schedules, updates in backward; Muon and Adafactor, which torch has only for unsharded parameters.

Other optimizers are those of torch and torchao, as they are.
"""

from tune.optimizers.groups import learning_rates, parameter_groups
from tune.optimizers.schedules import constant, cosine, inverse_square_root, linear, warmup_stable_decay
from tune.optimizers.updates import Adafactor, InBackward, Muon
