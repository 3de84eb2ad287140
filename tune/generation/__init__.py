"""Sampling from a model: `Sampler` runs it, `choose` takes a token for each row of logits, `rollout` adds rewards."""

from tune.generation.choose import choose
from tune.generation.rollout import Environment, Episode, Reward, is_live, micro_batches, rollout, statistics
from tune.generation.sampler import Completion, Sampler

__all__ = [
    "Completion",
    "Environment",
    "Episode",
    "Reward",
    "Sampler",
    "choose",
    "is_live",
    "micro_batches",
    "rollout",
    "statistics",
]
