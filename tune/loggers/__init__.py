"""The run folder and everything that is told about a run."""

from tune.loggers.accuracy import accuracy
from tune.loggers.evaluate import evaluate
from tune.loggers.flops import flops_per_token
from tune.loggers.profiler import profile
from tune.loggers.router_metrics import routing
from tune.loggers.sinks import Sink
from tune.loggers.training_run import Run, require_finite

__all__ = ["Run", "Sink", "accuracy", "evaluate", "flops_per_token", "profile", "require_finite", "routing"]
