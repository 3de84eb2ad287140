"""Policy gradient losses of sampled tokens.

Each takes, per supervised token, the policy's log-probs, those recorded while sampling and the advantages, `[tokens]`,
and the batch; it returns a loss for every token and whether its ratio was clipped, which removes its gradient or bounds
it. The caller divides the sum by the tokens of the whole step.
"""

import torch
from torch import Tensor

from tune.collators import Batch
from tune.errors import TuneError
from tune.losses.chunks import of_supervised
from tune.losses.log_probs import per_document
from tune.types import PositiveFloat


class PolicyGradient:
    """-min(ratio, max_ratio) A log p, where the ratio of the policy to the sampler is a constant: it corrects for the
    difference of the two, whether it comes from rounding or from an older policy (truncated importance sampling, Yao et
    al. 2025; CISPO, MiniMax 2025)."""

    def __init__(self, max_ratio: PositiveFloat = 2.0):
        self.max_ratio = max_ratio

    def __call__(self, log_probs: Tensor, sampled: Tensor, advantages: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        ratio = (log_probs - sampled).exp().detach()
        return -ratio.clamp(max=self.max_ratio) * advantages * log_probs, ratio > self.max_ratio


class ClippedPolicy:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) (Schulman et al. 2017), with two bounds (Yu et al. 2025)."""

    def __init__(self, low: PositiveFloat = 0.2, high: PositiveFloat = 0.28):
        self.low, self.high = low, high

    def __call__(self, log_probs: Tensor, sampled: Tensor, advantages: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        ratio = (log_probs - sampled).exp()
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        return -torch.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages


class GSPO(ClippedPolicy):
    """`ClippedPolicy` with the ratio of whole completions: the exponential of their mean log-ratio (Zheng et al. 2025).
    A completion counts by its tokens."""

    def __init__(self, low: PositiveFloat = 3e-4, high: PositiveFloat = 4e-4):
        super().__init__(low, high)

    def __call__(self, log_probs: Tensor, sampled: Tensor, advantages: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        sums = per_document(log_probs - sampled, batch) / batch.documents.num_supervised.clamp(min=1)
        of_sequence = sums[of_supervised(batch.documents.ids, batch)]
        return super().__call__(of_sequence, torch.zeros_like(of_sequence), advantages, batch)


def kl_estimate(log_probs: Tensor, others: Tensor) -> Tensor:
    """KL(policy | other) of each token, from one sample: e^d - d - 1, where d = other - policy (Schulman 2020)."""
    difference = others - log_probs
    return difference.exp() - difference - 1


def of_tokens(column: str, batch: Batch) -> Tensor:
    """A column per document or per token, for each supervised token, `[tokens]`."""
    values = batch.columns[column]
    if values.ndim == 2:
        return of_supervised(values, batch)
    return values[of_supervised(batch.documents.ids, batch)]


def token_values(hidden: Tensor, weight: Tensor, batch: Batch, *, softcap: float | None = None) -> Tensor:
    """A head of one output, `weight` `[1, dim]`: a value before each supervised token, `[tokens]`, in fp32. Raises
    TuneError for a head of more outputs."""
    if len(weight) != 1:
        raise TuneError(
            f"value: the model's head has {len(weight):,} outputs, and a value is one: set value.head=score"
        )
    return of_supervised(hidden, batch).float() @ weight[0].float()


def gae(rewards: Tensor, values: Tensor, batch: Batch, decay: float) -> Tensor:
    """Advantages by generalised advantage estimation (Schulman et al. 2016), without discount: all `[tokens]`.

    The column `reward` of a document is added to that of its last token. Computed on the host.
    """
    columns = of_supervised(batch.documents.ids, batch), of_tokens("reward", batch), rewards, values
    tokens = zip(*torch.stack([each.float() for each in columns]).cpu().tolist(), strict=True)
    found, document_after, later, value_after = list[float](), -1.0, 0.0, 0.0
    for document, of_document, reward, value in reversed(list(tokens)):
        if document != document_after:
            later, value_after, reward = 0.0, 0.0, reward + of_document
        later = reward + value_after - value + decay * later
        found.append(later)
        document_after, value_after = document, value
    return torch.tensor(found[::-1]).to(values)
