"""Losses, and the heads that compute their inputs. A new loss goes into its own file.

`LinearCrossEntropy` and the divergences are heads that return a sum over supervised tokens; the caller divides by the
token count of the whole optimizer step. `LogProbs` returns values per token and `LastTokenScores` values per document,
the inputs of preference, policy and reward losses. Heads are called with hidden states, an output weight, and labels or
a Batch. All but `LastTokenScores` accept shares of the output weight's rows (`takes_shares`).
"""

from tune.losses.chunks import LOGITS, VocabularyShard, normalize, takes_shares
from tune.losses.divergences import Divergence, ForwardKL, JensenShannon, MostProbable, ReverseKL, Teacher, TopK
from tune.losses.linear_cross_entropy import LinearCrossEntropy
from tune.losses.log_probs import LogProbs, TokenLogProbs, per_document
from tune.losses.policy import GSPO, ClippedPolicy, PolicyGradient, gae, kl_estimate, of_tokens, token_values
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
    of_rewards,
    require_attributes,
    sum_and_count,
)
from tune.losses.reward import BradleyTerry, LastTokenScores, score

# Other names are internal to `tune` and its recipes.
__all__ = [
    "CPO",
    "DPO",
    "GSPO",
    "IPO",
    "KTO",
    "ORPO",
    "AnswerLogProbs",
    "BradleyTerry",
    "ClippedPolicy",
    "Divergence",
    "ForwardKL",
    "JensenShannon",
    "LastTokenScores",
    "LinearCrossEntropy",
    "LogProbs",
    "MostProbable",
    "PolicyGradient",
    "ReverseKL",
    "SimPO",
    "Teacher",
    "TokenLogProbs",
    "TopK",
    "gae",
    "kl_estimate",
    "per_document",
    "score",
    "takes_shares",
]
