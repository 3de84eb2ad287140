"""Scores of documents, and the loss of reward models."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tune.collators import Batch
from tune.errors import TuneError
from tune.losses.supervised import require_tokens, require_vectors
from tune.types import NonNegativeFloat, NonNegativeInt, checked


def score(model: Any, batch: Batch) -> Tensor:
    """Return the scores of a batch's documents, `[documents]` in fp32, from a model built with the head `score`. The
    score of padding is meaningless."""
    return model(batch, LastTokenScores(model.config.pad_id))


def require_one_output(weight: Tensor) -> None:
    """Raise TuneError for a head with more than one output."""
    if len(weight) != 1:
        raise TuneError(
            f"weight: the head has {len(weight):,} outputs but must have one: build the model with head=score"
        )


@checked
class LastTokenScores:
    """A head with one output that scores each document at its last token other than `pad_id`, like transformers'
    `...ForSequenceClassification`, even if `pad_id` is the token that ends documents."""

    def __init__(self, pad_id: NonNegativeInt | None = None):
        self.pad_id = pad_id

    def __call__(self, hidden: Tensor, weight: Tensor, batch: Batch, *, softcap: float | None = None) -> Tensor:
        """`hidden` `[rows, seq, dim]`, `weight` `[1, dim]` -> `[documents]`, in fp32. Raises TuneError if shapes do not
        match."""
        require_one_output(weight)
        require_tokens("hidden", hidden, batch)
        starts, ends = (batch.documents.boundaries[part].long() for part in (slice(-1), slice(1, None)))
        last = ends - 1
        if self.pad_id is not None:
            places = torch.arange(batch.tokens.numel(), device=last.device)
            places = places.where(batch.tokens.flatten() != self.pad_id, 0)
            last = starts.scatter_reduce(0, batch.documents.ids.flatten(), places, "amax")
        return hidden.flatten(0, 1).index_select(0, last).float() @ weight[0].float()


@checked
class BradleyTerry:
    """-log s(r_w - r_l - m) + center (r_w + r_l)^2, with the scores r of the better and the worse answer and the pair's
    margin m (Ouyang et al. 2022; Touvron et al. 2023). A `center` of about 0.01 keeps scores near zero (Eisenstein et
    al. 2023)."""

    def __init__(self, center: NonNegativeFloat = 0.0):
        self.center = center

    def __call__(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
        """Return a loss per pair, `[pairs]`, from scores of the better and worse answers and margins (default: 0), all
        `[pairs]`. Raises TuneError if shapes do not match."""
        margin = torch.zeros_like(chosen) if margin is None else margin
        require_vectors(chosen=chosen, rejected=rejected, margin=margin)
        return -F.logsigmoid(chosen - rejected - margin) + self.center * (chosen + rejected).square()
