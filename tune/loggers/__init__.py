"""Metrics and the sinks that take them."""

from tune.loggers.sinks import Sink
