"""Losses that compare answers to a prompt, as functions of the log-probs of whole answers.

Each takes the better and the worse answers as `AnswerLogProbs`, `[pairs]` each, and returns a loss per pair, `[pairs]`,
in nats; `KTO` takes single answers, good or bad. The method `reward` returns a loss's implicit rewards, `[answers]`.
Losses with `needs_reference` compare the trained policy with a frozen reference.

    policy = per_document(LogProbs()(hidden, weight, labels).log_probs, labels)  # one log-prob per row
    answers = AnswerLogProbs(policy, reference)
    loss = DPO(beta=0.1)(answers.at(chosen), answers.at(rejected)).mean()
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tune.errors import TuneError
from tune.losses.supervised import require_vectors
from tune.types import Fraction, NonNegativeFloat, PositiveFloat, checked

REQUIRED = {  # attributes of a loss that recipes read
    "needs_reference": "True if the loss compares with a reference, else False",
    "reward": "a method reward(answers) that returns the implicit rewards, [answers]",
}


@dataclass(frozen=True, eq=False)
class AnswerLogProbs:
    """Log-probs of answers, summed over tokens, `[answers]`: under the trained policy and under a frozen `reference`.
    `lengths` are the numbers of tokens, for losses that use means.

    Raises:
        TuneError: shapes differ, or a loss needs a field that is missing.
    """

    policy: Tensor
    reference: Tensor | None = None
    lengths: Tensor | None = None

    def __post_init__(self) -> None:
        given = {"policy": self.policy, "reference": self.reference, "lengths": self.lengths}
        hint = "An answer has one log-prob, the sum over its tokens"
        require_vectors(hint, **{name: tensor for name, tensor in given.items() if tensor is not None})

    def at(self, index: Tensor) -> "AnswerLogProbs":
        """Return the answers at `index`."""
        others = (None if each is None else each[index] for each in (self.reference, self.lengths))
        return AnswerLogProbs(self.policy[index], *others)

    @property
    def ratio(self) -> Tensor:
        """The policy's log-prob minus the reference's, `[answers]`."""
        if self.reference is None:
            raise TuneError(
                "reference: this loss needs the log-probs of a reference, but there are none. Pass "
                "AnswerLogProbs(policy, reference), or use a loss without a reference: SimPO, CPO, ORPO. Set "
                "needs_reference = True in your own loss"
            )
        return self.policy - self.reference

    @property
    def mean(self) -> Tensor:
        """The policy's mean log-prob per token, `[answers]`."""
        return self.policy / self._required_lengths()

    @property
    def mean_ratio(self) -> Tensor:
        """`ratio` per token, `[answers]`."""
        return self.ratio / self._required_lengths()

    def _required_lengths(self) -> Tensor:
        if self.lengths is None:
            raise TuneError(
                "lengths: this loss uses means over tokens, but the numbers of tokens are missing. Pass "
                "AnswerLogProbs(policy, reference, lengths)"
            )
        return self.lengths


def as_answers(answers: AnswerLogProbs | Tensor) -> AnswerLogProbs:
    """Wrap a tensor of the policy's log-probs as `AnswerLogProbs`."""
    return answers if isinstance(answers, AnswerLogProbs) else AnswerLogProbs(answers)


def compared(
    chosen: AnswerLogProbs | Tensor, rejected: AnswerLogProbs | Tensor
) -> tuple[AnswerLogProbs, AnswerLogProbs]:
    """Return both as `AnswerLogProbs`. Raises TuneError unless they have the same shape."""
    one, other = as_answers(chosen), as_answers(rejected)
    require_vectors(chosen=one.policy, rejected=other.policy)
    return one, other


def require_attributes(loss_fn: Any, *names: str) -> None:
    """Raise TuneError if a custom loss lacks one of the attributes `names`, see `REQUIRED`."""
    kind = loss_fn if hasattr(loss_fn, "__name__") else type(loss_fn)
    for name in names:
        if not hasattr(loss_fn, name):
            raise TuneError(f"loss: {kind.__module__}.{kind.__name__} has no `{name}`. Add it: {REQUIRED[name]}")


def of_pairs(loss_fn: Any, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> dict[str, Tensor]:
    """Return metrics of pairs by name, as (sum, count) `[2]`."""
    logps = {"logps/chosen": sum_and_count(chosen.policy), "logps/rejected": sum_and_count(rejected.policy)}
    return {**of_rewards(loss_fn.reward(chosen), loss_fn.reward(rejected)), **logps}


def of_rewards(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return metrics of the rewards of pairs, `[pairs]` each."""
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(),
    }
    return {name: sum_and_count(value) for name, value in values.items()}


def of_labelled(loss_fn: Any, answers: AnswerLogProbs, is_good: Tensor) -> dict[str, Tensor]:
    """Return the metrics of labeled answers; good answers count as chosen, bad ones as rejected."""
    values = {"rewards": loss_fn.reward(answers), "logps": answers.policy}
    sides = {"chosen": is_good, "rejected": ~is_good}
    return {f"{name}/{side}": sum_and_count(value, at) for name, value in values.items() for side, at in sides.items()}


def sum_and_count(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return (sum, count) `[2]` of a vector, or of its values with weight 1. Raises TuneError for another shape: a
    custom loss may return a mean, or `[tokens, tokens]` by broadcasting."""
    if values.ndim != 1:
        raise TuneError(f"loss: returns shape {[*values.shape]}; it must return one number per pair, or one per token")
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    return torch.stack([(values * weights).sum(), weights.sum()])


@checked
class DPO:
    """-(1 - e) log s(m) - e log s(-m), where m is beta times the difference of the answers' log-ratios and e is
    `label_smoothing` (Rafailov et al. 2023; Mitchell 2023). `length_normalized` uses means over tokens and needs a
    `beta` of about 5 (Meng et al. 2024)."""

    needs_reference = True

    def __init__(self, beta: PositiveFloat = 0.1, label_smoothing: Fraction = 0.0, length_normalized: bool = False):
        self.beta, self.label_smoothing, self.length_normalized = beta, label_smoothing, length_normalized

    def __call__(self, chosen: AnswerLogProbs | Tensor, rejected: AnswerLogProbs | Tensor) -> Tensor:
        chosen, rejected = compared(chosen, rejected)
        margin = self.reward(chosen) - self.reward(rejected)
        return -(1 - self.label_smoothing) * F.logsigmoid(margin) - self.label_smoothing * F.logsigmoid(-margin)

    def reward(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * (answers.mean_ratio if self.length_normalized else answers.ratio)


@checked
class IPO:
    """(m - 1 / (2 beta))^2, where m is the difference of the mean log-ratios per token (Azar et al. 2023)."""

    needs_reference = True

    def __init__(self, beta: PositiveFloat = 0.1):
        self.beta = beta

    def __call__(self, chosen: AnswerLogProbs | Tensor, rejected: AnswerLogProbs | Tensor) -> Tensor:
        chosen, rejected = compared(chosen, rejected)
        return (chosen.mean_ratio - rejected.mean_ratio - 1 / (2 * self.beta)).square()

    def reward(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.mean_ratio


@checked
class SimPO:
    """-log s(beta (a_w - a_l) - gamma), where a are mean log-probs per token (Meng et al. 2024; the paper's gamma /
    beta is `gamma` divided by `beta`)."""

    needs_reference = False

    def __init__(self, beta: PositiveFloat = 2.0, gamma: NonNegativeFloat = 1.0):
        self.beta, self.gamma = beta, gamma

    def __call__(self, chosen: AnswerLogProbs | Tensor, rejected: AnswerLogProbs | Tensor) -> Tensor:
        chosen, rejected = compared(chosen, rejected)
        return -F.logsigmoid(self.reward(chosen) - self.reward(rejected) - self.gamma)

    def reward(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.mean


@checked
class CPO:
    """-log s(beta (l_w - l_l)) + nll * NLL_w, where l are summed log-probs and NLL_w is the mean over the chosen
    answer's tokens (Xu et al. 2024)."""

    needs_reference = False

    def __init__(self, beta: PositiveFloat = 0.1, nll: NonNegativeFloat = 1.0):
        self.beta, self.nll = beta, nll

    def __call__(self, chosen: AnswerLogProbs | Tensor, rejected: AnswerLogProbs | Tensor) -> Tensor:
        chosen, rejected = compared(chosen, rejected)
        loss = -F.logsigmoid(self.reward(chosen) - self.reward(rejected))
        return loss - self.nll * chosen.mean if self.nll else loss

    def reward(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.policy


@checked
class ORPO:
    """NLL_w - beta log s(log odds_w - log odds_l), where odds = p / (1 - p) and log p is the mean log-prob of an
    answer's tokens (Hong et al. 2024)."""

    needs_reference = False

    def __init__(self, beta: PositiveFloat = 0.1):
        self.beta = beta

    def __call__(self, chosen: AnswerLogProbs | Tensor, rejected: AnswerLogProbs | Tensor) -> Tensor:
        chosen, rejected = compared(chosen, rejected)
        log_odds = _log_odds(chosen.mean) - _log_odds(rejected.mean)
        return -chosen.mean - self.beta * F.logsigmoid(log_odds)

    def reward(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.mean


@checked
class KTO:
    """desirable (1 - s(beta (r - z))) for good answers, undesirable (1 - s(beta (z - r))) for bad ones, where r is the
    log-ratio. z = max(0, mean log-ratio of the global batch's prompts with answers to other prompts) is constant
    (Ethayarajh et al. 2024). Choose the two weights so that all good and all bad answers count about the same."""

    needs_reference = True

    def __init__(
        self, beta: PositiveFloat = 0.1, desirable: NonNegativeFloat = 1.0, undesirable: NonNegativeFloat = 1.0
    ):
        self.beta, self.desirable, self.undesirable = beta, desirable, undesirable

    def __call__(self, answers: AnswerLogProbs | Tensor, is_good: Tensor, mismatched_ratio: Tensor) -> Tensor:
        """`is_good` (bool) `[answers]`; `mismatched_ratio` is the mean log-ratio of mismatched answers, a scalar."""
        answers = as_answers(answers)
        require_vectors(answers=answers.policy, is_good=is_good)
        if is_good.dtype != torch.bool:
            raise TuneError(f"is_good: must be bool, got {is_good.dtype}: pass is_good == 1")
        if mismatched_ratio.numel() != 1:
            raise TuneError(f"mismatched_ratio: must be one number, the mean; got shape {[*mismatched_ratio.shape]}")
        margin = self.beta * (answers.ratio - mismatched_ratio.clamp(min=0))
        good, bad = self.desirable * torch.sigmoid(-margin), self.undesirable * torch.sigmoid(margin)
        return torch.where(is_good, good, bad)

    def reward(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.ratio


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log(p / (1 - p)), accurate in fp32 also for small p. p is kept slightly below 1, to stay finite."""
    log_p = log_p.clamp(max=-1e-6)
    return log_p - torch.where(log_p > -0.7, torch.log(-torch.expm1(log_p)), torch.log1p(-torch.exp(log_p)))
