"""What lm-evaluation-harness asks of a model: its `Tasks`, the `HarnessModel` that answers them (harness.py, the only
file that needs that library), and `log_likelihoods`; `Evaluator` calls these, and whatever else measures a
model, as a training goes on.
Losses on validation data, the accuracy and the routing are metrics that the model gives itself."""

from tune.evaluation.evaluator import Evaluator
from tune.evaluation.likelihoods import log_likelihoods
from tune.evaluation.tasks import Tasks, exact_match, metrics, require_numbers
from tune.evaluation.validation import accuracy, add, evaluate, means, routing, validate
from tune.evaluation.work import require_work

# Other names are for the packages of `tune` alone.
__all__ = [
    "Evaluator",
    "Tasks",
    "accuracy",
    "add",
    "evaluate",
    "exact_match",
    "log_likelihoods",
    "means",
    "metrics",
    "require_numbers",
    "require_work",
    "routing",
    "validate",
]
