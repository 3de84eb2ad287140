"""Sampling from a model: `Sampler` runs it, `choose` takes a token for each row of logits."""

from tune.generation.choose import choose
from tune.generation.sampler import Completion, Sampler

__all__ = ["Completion", "Sampler", "choose"]
