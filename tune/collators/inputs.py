"""Collate rows of samples into the arguments of a transformers model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tune.collators.batch import IGNORE, Sample
from tune.errors import TuneError


def collate_inputs(rows: Sequence[Sample | Sequence[Sample]], pad_id: int = 0) -> dict[str, Any]:
    """Return `input_ids` and `labels`, int64 `[rows, seq]`, for a transformers model: `model(**inputs)`.

    Labels are not shifted: the model shifts them.

    Rows of one document are padded with `pad_id` to the longest; `attention_mask` is 0 for padding. If any row has
    several documents, all rows are joined into one, `[1, total]`, without padding, and `position_ids` restart in each
    document. transformers separates documents by positions only without mask and cache, so `use_cache` is False.
    Columns are left out. Raises TuneError for samples with weights, which these models do not support.
    """
    documents = [[row] if isinstance(row, Sample) else list(row) for row in rows]
    if any(document.weights is not None for row in documents for document in row):
        raise TuneError(
            "weights: transformers models do not support weights of messages or tokens in their loss. Remove the "
            "weights, or use tune.collators.collate and a loss of tune.losses"
        )
    if any(len(row) > 1 for row in documents):
        return _joined([_unshifted(document) for row in documents for document in row])
    pairs = [_unshifted(document) for row in documents for document in row]
    longest = max(len(tokens) for tokens, _ in pairs)
    input_ids = np.full((len(pairs), longest), pad_id, dtype=np.int64)
    labels = np.full_like(input_ids, IGNORE)
    mask = np.zeros_like(input_ids)
    for row, (tokens, targets) in enumerate(pairs):
        input_ids[row, : len(tokens)], labels[row, : len(tokens)], mask[row, : len(tokens)] = tokens, targets, 1
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "attention_mask": torch.from_numpy(mask),
    }


def _joined(pairs: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    tokens, labels = zip(*pairs, strict=True)
    positions = [np.arange(len(each)) for each in tokens]
    named = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    joined = {name: np.concatenate(values)[None].astype(np.int64) for name, values in named.items()}
    return {"use_cache": False, **{name: torch.from_numpy(values) for name, values in joined.items()}}


def _unshifted(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and unshifted labels. If the last label is supervised (a piece of a longer text), appends its token."""
    tokens, labels = np.asarray(sample.tokens), np.asarray(sample.labels)
    if labels[-1] != IGNORE:
        tokens, labels = np.append(tokens, labels[-1]), np.append(labels, IGNORE)
    return tokens, np.append(IGNORE, labels[:-1])
