"""The run folder, metrics and messages of a run."""

from tune.loggers.flops import flops_per_token
from tune.loggers.model_metrics import accuracy, add, evaluate, means, routing, validate
from tune.loggers.profiler import profile
from tune.loggers.sinks import Sink
from tune.loggers.training_run import Run
