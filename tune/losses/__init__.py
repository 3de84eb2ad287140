"""Losses, and the heads that give what they are made of. A new one goes into a file of its own.

`LinearCrossEntropy` and the divergences are heads that return a sum over supervised tokens: the caller divides by the
count of the whole optimizer step. `LogProbs` is a head that returns values per token, of which a recipe makes its loss.
"""

from tune.losses.divergences import Divergence, ForwardKL, JensenShannon, ReverseKL, Teacher
from tune.losses.linear_cross_entropy import LinearCrossEntropy
from tune.losses.log_probs import LogProbs, TokenLogProbs, per_document
from tune.losses.policy import GSPO, ClippedPolicy, PolicyGradient, kl_estimate, of_tokens
from tune.losses.preference import (
    CPO,
    DPO,
    IPO,
    KTO,
    ORPO,
    AnswerLogProbs,
    SimPO,
    of_labelled,
    of_pairs,
    sum_and_count,
)

__all__ = [
    "CPO",
    "DPO",
    "GSPO",
    "IPO",
    "KTO",
    "ORPO",
    "AnswerLogProbs",
    "ClippedPolicy",
    "Divergence",
    "ForwardKL",
    "JensenShannon",
    "LinearCrossEntropy",
    "LogProbs",
    "PolicyGradient",
    "ReverseKL",
    "SimPO",
    "Teacher",
    "TokenLogProbs",
    "kl_estimate",
    "of_labelled",
    "of_pairs",
    "of_tokens",
    "per_document",
    "sum_and_count",
]
