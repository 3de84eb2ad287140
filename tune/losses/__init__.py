"""Losses and values per token, from hidden states by chunks. A loss is a sum over supervised tokens; the caller divides
by the count of the whole optimizer step."""

from tune.losses.divergences import Divergence, ForwardKL, JensenShannon, ReverseKL, Teacher
from tune.losses.linear_cross_entropy import LinearCrossEntropy
from tune.losses.log_probs import LogProbs, TokenLogProbs, per_document

__all__ = [
    "Divergence",
    "ForwardKL",
    "JensenShannon",
    "LinearCrossEntropy",
    "LogProbs",
    "ReverseKL",
    "Teacher",
    "TokenLogProbs",
    "per_document",
]
