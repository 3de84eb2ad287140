"""The run folder and everything that is told about a run."""

from tune.loggers.accuracy import accuracy
from tune.loggers.flops import flops_per_token
from tune.loggers.profiler import profile
from tune.loggers.routing import routing
from tune.loggers.run import Run, require_finite
from tune.loggers.sinks import Sink

__all__ = ["Run", "Sink", "accuracy", "flops_per_token", "profile", "require_finite", "routing"]
