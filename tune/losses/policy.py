"""Policy gradient losses for sampled tokens.

Each loss takes, per supervised token, the policy's log-probs, the log-probs recorded while sampling, and advantages,
`[tokens]`. It returns a loss per token and whether the token's ratio was clipped, which removes or bounds its gradient.
The caller divides the sum by the tokens of the whole step. For padded rows `[rows, seq]`, pass only the tokens that
count: `values[mask]`.

Functions of whole completions (`GSPO`, `gae`) take the tokens of completions as last argument: a Batch, or a mask
(bool) or labels `[rows, seq]` with one completion per row. Recipes pass it to every loss.
"""

import torch
from torch import Tensor

from tune.collators import Batch
from tune.errors import TuneError
from tune.losses.log_probs import per_document
from tune.losses.reward import require_one_output
from tune.losses.supervised import Labels, documents_of, of_supervised, require_equal_shapes, require_vectors
from tune.types import PositiveFloat, UnitInterval, checked

OF_TOKENS = "For padded rows [rows, seq], pass only the tokens that count: values[mask]"


@checked
class PolicyGradient:
    """-min(ratio, max_ratio) A log p, where the ratio of policy to sampler is constant (no gradient). It corrects for
    differences between the two from rounding or from an older policy (truncated importance sampling, Yao et al. 2025;
    CISPO, MiniMax 2025)."""

    def __init__(self, max_ratio: PositiveFloat = 2.0):
        self.max_ratio = max_ratio

    def __call__(
        self, log_probs: Tensor, sampled: Tensor, advantages: Tensor, labels: Labels | None = None
    ) -> tuple[Tensor, Tensor]:
        """All arguments are `[tokens]`; `labels` are not used."""
        require_vectors(OF_TOKENS, log_probs=log_probs, sampled=sampled, advantages=advantages)
        ratio = (log_probs - sampled).exp().detach()
        return -ratio.clamp(max=self.max_ratio) * advantages * log_probs, ratio > self.max_ratio


@checked
class ClippedPolicy:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) (Schulman et al. 2017), with two bounds (Yu et al. 2025)."""

    def __init__(self, low: PositiveFloat = 0.2, high: PositiveFloat = 0.28):
        self.low, self.high = low, high

    def __call__(
        self, log_probs: Tensor, sampled: Tensor, advantages: Tensor, labels: Labels | None = None
    ) -> tuple[Tensor, Tensor]:
        """All arguments are `[tokens]`; `labels` are not used."""
        require_vectors(OF_TOKENS, log_probs=log_probs, sampled=sampled, advantages=advantages)
        ratio = (log_probs - sampled).exp()
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        return -torch.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages


@checked
class GSPO(ClippedPolicy):
    """`ClippedPolicy` with ratios of whole completions: the exponential of the mean log-ratio (Zheng et al. 2025). Each
    token of a completion has the completion's ratio."""

    def __init__(self, low: PositiveFloat = 3e-4, high: PositiveFloat = 4e-4):
        super().__init__(low, high)

    def __call__(
        self, log_probs: Tensor, sampled: Tensor, advantages: Tensor, labels: Labels | None = None
    ) -> tuple[Tensor, Tensor]:
        """All arguments are `[tokens]`; `labels` define the tokens of completions: a Batch, or a mask or labels
        `[rows, seq]`."""
        require_vectors(OF_TOKENS, log_probs=log_probs, sampled=sampled, advantages=advantages)
        if labels is None:
            raise TuneError("labels: GSPO needs the tokens of whole completions: pass a Batch, or a mask [rows, seq]")
        completions, _ = documents_of(labels)
        means = per_document(log_probs - sampled, labels) / per_document(torch.ones_like(sampled), labels).clamp(min=1)
        of_completion = means[completions]
        return super().__call__(of_completion, torch.zeros_like(of_completion), advantages)


def kl_estimate(log_probs: Tensor, others: Tensor) -> Tensor:
    """Estimate KL(policy | other) of each token from one sample: e^d - d - 1, where d = other - policy (Schulman 2020).

    Both arguments and the result have the same shape. Raises TuneError if the shapes differ.
    """
    require_equal_shapes(log_probs=log_probs, others=others)
    difference = others - log_probs
    return difference.exp() - difference - 1


def of_tokens(column: str, batch: Batch) -> Tensor:
    """Return a column (per document or per token) for each supervised token, `[tokens]`."""
    values = batch.columns[column]
    if values.ndim == 2:
        return of_supervised(values, batch)
    return values[of_supervised(batch.documents.ids, batch)]


def token_values(hidden: Tensor, weight: Tensor, labels: Labels, *, softcap: float | None = None) -> Tensor:
    """A head with one output, `weight` `[1, dim]`: the value before each supervised token, `[tokens]`, in fp32. Raises
    TuneError for a head with more outputs."""
    require_one_output(weight)
    return of_supervised(hidden, labels, "hidden").float() @ weight[0].float()


@checked
def gae(rewards: Tensor, values: Tensor, labels: Labels, decay: UnitInterval, final: Tensor | None = None) -> Tensor:
    """Compute advantages `[tokens]` by generalized advantage estimation (Schulman et al. 2016), without discount.

    Args:
        rewards: the reward of each token, `[tokens]`.
        values: the critic's value before each token, `[tokens]`.
        labels: the tokens of completions: a Batch, or a mask (bool) or labels `[rows, seq]`.
        decay: lambda: 0 looks one token ahead, 1 to the end.
        final: rewards of whole completions, added to their last tokens' rewards, `[documents]` or `[rows]`.

    Computed on the host. Raises TuneError if shapes do not match.
    """
    completions, count = documents_of(labels)
    require_vectors(OF_TOKENS, labels=completions, rewards=rewards, values=values)
    if final is None:
        final = rewards.new_zeros(count)
    require_vectors(labels=completions.new_zeros(count), final=final)
    columns = (completions, final[completions], rewards, values)
    tokens = zip(*torch.stack([column.double() for column in columns]).cpu().tolist(), strict=True)
    advantages, document_after, later, value_after = list[float](), -1.0, 0.0, 0.0
    for document, of_document, reward, value in reversed(list(tokens)):
        if document != document_after:
            later, value_after, reward = 0.0, 0.0, reward + of_document
        later = reward + value_after - value + decay * later
        advantages.append(later)
        document_after, value_after = document, value
    return torch.tensor(advantages[::-1], dtype=torch.float64).to(values)
