"""Sample from a model. `Sampler` samples batches of prompts, `Continuation` yields tokens one by one, `choose` picks a
token per row of logits, `answer` splits prompts over processes, `Rollouts` adds rewards, `own_answers` puts samples
into the batches of a dataset. `VLLM` samples with vLLM."""

from tune.generation.continuation import Continuation
from tune.generation.own_answers import own_answers
from tune.generation.reward_model import RewardModel
from tune.generation.rollout import (
    EXAMPLES,
    Environment,
    Episode,
    Reward,
    check_prompts,
    counts,
    global_batch,
    is_live,
    rollout,
    statistics,
)
from tune.generation.rollouts import Rollouts
from tune.generation.sampler import PREFILL_TOKENS, Completion, Sampler, answer, choose
from tune.generation.vllm_engine import VLLM

# Other names are internal to `tune`.
__all__ = [
    "VLLM",
    "Completion",
    "Continuation",
    "Environment",
    "Episode",
    "Reward",
    "RewardModel",
    "Rollouts",
    "Sampler",
    "answer",
    "check_prompts",
    "choose",
    "counts",
    "global_batch",
    "is_live",
    "own_answers",
    "rollout",
    "statistics",
]
