"""Losses that compare answers to a prompt: functions of the log-probs of whole answers.

Each takes the better and the worse answers as `AnswerLogProbs`, `[pairs]` each, and returns a loss for every pair,
`[pairs]`, in nats; `KTO` takes answers that are good or bad. Its `reward` is what the answers are worth to it,
`[answers]`. Those with `needs_reference` compare the policy that is trained with a frozen reference.

    policy = per_document(LogProbs()(hidden, weight, labels).log_probs, labels)  # one log-prob for each row
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

REQUIRED = {  # attributes that recipes read of a loss
    "needs_reference": "whether it compares with a reference, True or False",
    "reward": "a method reward(answers) that gives what answers are worth to it, [answers]",
}


@dataclass(frozen=True, eq=False)
class AnswerLogProbs:
    """Log-probs of answers, each the sum over its tokens, `[answers]`: under the policy that is trained, and under a
    frozen `reference`. `lengths` are the answers' numbers of tokens, for losses that take means.

    Raises:
        TuneError: one of them has another shape; or a loss needs what is not given.
    """

    policy: Tensor
    reference: Tensor | None = None
    lengths: Tensor | None = None

    def __post_init__(self) -> None:
        given = {"policy": self.policy, "reference": self.reference, "lengths": self.lengths}
        hint = "An answer has one log-prob, the sum over its tokens"
        require_vectors(hint, **{name: tensor for name, tensor in given.items() if tensor is not None})

    def at(self, index: Tensor) -> "AnswerLogProbs":
        """The answers at `index`."""
        others = (None if each is None else each[index] for each in (self.reference, self.lengths))
        return AnswerLogProbs(self.policy[index], *others)

    @property
    def ratio(self) -> Tensor:
        """The policy's log-prob less the reference's, `[answers]`."""
        if self.reference is None:
            raise TuneError(
                "reference: this loss compares with the log-probs of a reference, and there are none. Give "
                "AnswerLogProbs(policy, reference), or take a loss without: SimPO, CPO, ORPO. A loss of your own says "
                "needs_reference = True"
            )
        return self.policy - self.reference

    @property
    def mean(self) -> Tensor:
        """The policy's log-prob of a token, `[answers]`."""
        return self.policy / self._required_lengths()

    @property
    def mean_ratio(self) -> Tensor:
        """`ratio` of a token, `[answers]`."""
        return self.ratio / self._required_lengths()

    def _required_lengths(self) -> Tensor:
        if self.lengths is None:
            raise TuneError(
                "lengths: this loss takes means over tokens, and their numbers are missing. Give "
                "AnswerLogProbs(policy, reference, lengths)"
            )
        return self.lengths


def as_answers(answers: AnswerLogProbs | Tensor) -> AnswerLogProbs:
    """`AnswerLogProbs` of a tensor, which is the policy's."""
    return answers if isinstance(answers, AnswerLogProbs) else AnswerLogProbs(answers)


def compared(
    chosen: AnswerLogProbs | Tensor, rejected: AnswerLogProbs | Tensor
) -> tuple[AnswerLogProbs, AnswerLogProbs]:
    """Both as `AnswerLogProbs`. Raises TuneError unless they have one shape."""
    one, other = as_answers(chosen), as_answers(rejected)
    require_vectors(chosen=one.policy, rejected=other.policy)
    return one, other


def require_attributes(loss_fn: Any, *names: str) -> None:
    """Raise TuneError if a loss of a user's own lacks one of the attributes `names`, see `REQUIRED`."""
    kind = loss_fn if hasattr(loss_fn, "__name__") else type(loss_fn)
    for name in names:
        if not hasattr(loss_fn, name):
            raise TuneError(f"loss: {kind.__module__}.{kind.__name__} has no `{name}`. Add it: {REQUIRED[name]}")


def of_pairs(loss_fn: Any, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> dict[str, Tensor]:
    """Metrics of pairs: by name a sum, and of how many, `[2]`."""
    logps = {"logps/chosen": sum_and_count(chosen.policy), "logps/rejected": sum_and_count(rejected.policy)}
    return {**of_rewards(loss_fn.reward(chosen), loss_fn.reward(rejected)), **logps}


def of_rewards(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Those of what the answers of pairs are worth, `[pairs]` each."""
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(),
    }
    return {name: sum_and_count(value) for name, value in values.items()}


def of_labelled(loss_fn: Any, answers: AnswerLogProbs, is_good: Tensor) -> dict[str, Tensor]:
    """The same of labelled answers, whose good ones count as chosen and the bad ones as rejected."""
    values = {"rewards": loss_fn.reward(answers), "logps": answers.policy}
    sides = {"chosen": is_good, "rejected": ~is_good}
    return {f"{name}/{side}": sum_and_count(value, at) for name, value in values.items() for side, at in sides.items()}


def sum_and_count(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """`[2]`: the sum of the `values`, or of those whose weight is 1 and not 0, and how many these are. Raises TuneError
    for a mean in their place, as a loss of a user's own may give."""
    if values.ndim == 0:
        raise TuneError("loss: it returns one number; it must return a loss for each pair, [pairs]")
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    return torch.stack([(values * weights).sum(), weights.sum()])


@checked
class DPO:
    """-(1 - e) log s(m) - e log s(-m), where m is beta times the difference of the answers' log-ratios and e is
    `label_smoothing` (Rafailov et al. 2023; Mitchell 2023). `length_normalized` takes means over tokens; it wants a
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
    """(m - 1 / (2 beta))^2, where m is the difference of the log-ratios, means over tokens (Azar et al. 2023)."""

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
    """-log s(beta (a_w - a_l) - gamma), where a are means over tokens (Meng et al. 2024, whose gamma / beta is `gamma`
    divided by `beta` here)."""

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
    """-log s(beta (l_w - l_l)) + nll * NLL_w, where l are sums and NLL_w is the mean over the chosen answer's tokens
    (Xu et al. 2024)."""

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
    """NLL_w - beta log s(log odds_w - log odds_l), where odds = p / (1 - p) and log p is the mean over an answer's
    tokens (Hong et al. 2024)."""

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
    log-ratio and z = max(0, mean log-ratio of the global batch's prompts with answers to others) is a constant
    (Ethayarajh et al. 2024). Weigh the two so that together the good and the bad answers count about the same."""

    needs_reference = True

    def __init__(
        self, beta: PositiveFloat = 0.1, desirable: NonNegativeFloat = 1.0, undesirable: NonNegativeFloat = 1.0
    ):
        self.beta, self.desirable, self.undesirable = beta, desirable, undesirable

    def __call__(self, answers: AnswerLogProbs | Tensor, is_good: Tensor, mismatched_ratio: Tensor) -> Tensor:
        """`is_good` (bool) `[answers]`; `mismatched_ratio` is the mean of the mismatched ones, a scalar."""
        answers = as_answers(answers)
        require_vectors(answers=answers.policy, is_good=is_good)
        if is_good.dtype != torch.bool:
            raise TuneError(f"is_good: it is {is_good.dtype}; it must be bool: is_good == 1")
        if mismatched_ratio.numel() != 1:
            raise TuneError(f"mismatched_ratio: the shape is {[*mismatched_ratio.shape]}; it is one number, their mean")
        margin = self.beta * (answers.ratio - mismatched_ratio.clamp(min=0))
        good, bad = self.desirable * torch.sigmoid(-margin), self.undesirable * torch.sigmoid(margin)
        return torch.where(is_good, good, bad)

    def reward(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.ratio


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)), in fp32 also for small p; a p of 1 counts as a little less, or it would be infinite."""
    log_p = log_p.clamp(max=-1e-6)
    return log_p - torch.where(log_p > -0.7, torch.log(-torch.expm1(log_p)), torch.log1p(-torch.exp(log_p)))
