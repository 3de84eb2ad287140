"""Find the errors of a run before it starts, by rehearsing its recipe. Checks belong in the functions that the run
itself calls, and rules in `tune.rules`."""

from tune.validate.checks import validate
from tune.validate.fake_tensors import FakeWeights, ReadNumbers
from tune.validate.hooks import Entered, Hooks
from tune.validate.made_up import NotRehearsed
from tune.validate.recipe import Recipe, described
from tune.validate.rehearse import Errors, NotSaved, Uninitialized, is_limit, process_group, rehearsed
from tune.validate.stand_ins import RehearsedCheckpointer, RehearsedRun, RehearsedWorld

# Other names are internal to `tune`.
__all__ = [
    "validate",
]
