"""Evaluate models. `Tasks` are tasks of lm-evaluation-harness, `HarnessModel` answers them (harness.py, the only file
that needs that library), and `log_likelihoods` scores continuations. `Evaluator` runs these and other measurements
during training. `validate`, `accuracy` and `routing` compute metrics from the model's own forwards."""

from tune.evaluation.evaluator import Evaluator
from tune.evaluation.likelihoods import log_likelihoods
from tune.evaluation.tasks import Tasks, exact_match, metrics, require_numbers
from tune.evaluation.validation import accuracy, add, evaluate, routing, validate
from tune.evaluation.work import require_work

# Other names are internal to `tune`.
__all__ = [
    "Evaluator",
    "Tasks",
    "accuracy",
    "add",
    "evaluate",
    "exact_match",
    "log_likelihoods",
    "metrics",
    "require_numbers",
    "require_work",
    "routing",
    "validate",
]
