"""What is wrong with a run, before it starts. A check is the function that the run itself calls; a rule goes to
`tune.rules`."""

from tune.validate.checks import validate
from tune.validate.fake_tensors import FakeWeights
from tune.validate.rehearse import Recipe, Uninitialised, process_group, rehearsed
from tune.validate.stand_ins import RehearsedCheckpointer, RehearsedRun, RehearsedWorld
from tune.validate.statements import Statements

# Other names are for the packages of `tune` alone.
__all__ = [
    "validate",
]
