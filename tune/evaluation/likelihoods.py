"""Log-likelihoods of given continuations, as packed documents."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from tune.collators import IGNORE, Batch, Sample, collate
from tune.distributed import World, inference
from tune.errors import TuneError
from tune.losses import LogProbs, TokenLogProbs

BATCH_TOKENS = 8192  # of a forward

Ids = Sequence[int]


def log_likelihoods(
    model: nn.Module, requests: Sequence[tuple[Ids, Ids]], world: World, max_length: int, batch_size: int | None = None
) -> list[tuple[float, bool]]:
    """For each of `requests`, a context and its continuation, the log-prob of the continuation, and whether each of its
    tokens is the most probable one. All processes call it with the same requests, and share them.

    Requests with the same tokens before the last one, as the choices A to D of a question, are one document. Documents
    are sorted by their tokens: those that begin alike, as a question with each of its choices, or behind the same
    examples, are then in one batch, and models of `tune.models.build` compute their beginning once. A batch has
    `batch_size` documents, or as many as have `BATCH_TOKENS` tokens. Contexts are cut from the left to `max_length`
    tokens. Raises TuneError for a continuation that is longer, for an empty context, and on all processes if the
    log-prob of a continuation is NaN.
    """
    inputs: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        if len(continuation) > max_length:
            raise TuneError(f"{len(continuation):,} tokens are to be predicted at once, and max_length is {max_length}")
        if continuation and not len(context):
            raise TuneError(f"request {index} has no context, of which its first token is predicted: begin it with BOS")
        if continuation:
            inputs.setdefault((*context, *continuation)[-max_length - 1 : -1], []).append(index)
    ordered = sorted(inputs)
    ends = np.cumsum([0, *map(len, ordered)])  # each process has documents of about as many tokens
    bounds = ends[-1] * np.array([world.data_rank, world.data_rank + 1]) / world.data_size
    mine = ordered[slice(*np.searchsorted(ends, bounds))]
    found: dict[int, tuple[float, bool]] = {}
    is_off = None if world.is_main else True  # None: without a terminal
    with inference(model), tqdm(total=len(mine), desc="log-likelihoods", disable=is_off) as bar:
        while mine:
            sizes = np.cumsum([1 if batch_size else len(each) for each in mine[:BATCH_TOKENS]])
            fitting = max(1, int(np.searchsorted(sizes, batch_size or BATCH_TOKENS, "right")))
            documents, mine = mine[:fitting], mine[fitting:]
            indices = [inputs[each] for each in documents]
            answers = _forward(model, documents, [[requests[at][1] for at in each] for each in indices], world.device)
            found |= zip(itertools.chain(*indices), answers, strict=True)
            bar.update(len(documents))
    together = {index: value for each in world.all_gather(found) for index, value in each.items()}
    if broken := [index for index, (value, _) in together.items() if math.isnan(value)]:
        raise TuneError(
            f"the log-probs of {len(broken)} of {len(requests)} texts are NaN, as weights or activations are. Go back "
            "to an earlier checkpoint, or use dtype=fp32"
        )
    return [together.get(index, (0.0, True)) for index in range(len(requests))]  # an empty one has no tokens


def _forward(
    model: nn.Module, documents: list[tuple[int, ...]], continuations: list[list[Ids]], device: torch.device
) -> list[tuple[float, bool]]:
    """Of all `continuations` of each document, whose last tokens predict them."""
    samples = []
    for document, several in zip(documents, continuations, strict=True):
        labels = np.full(len(document), IGNORE)
        labels[-max(map(len, several)) :] = 0  # predicts something: what is before may be shared
        samples.append(Sample(np.array(document), labels))
    batch = collate([samples])
    ends = batch.documents.boundaries[1:].numpy().repeat([*map(len, continuations)])
    flat = [*itertools.chain(*continuations)]
    places = np.concatenate([np.arange(end - len(each), end) for end, each in zip(ends, flat, strict=True)])
    targets, predicting = np.concatenate(flat)[None], torch.from_numpy(places).to(device)
    wanted = Batch.of(targets, targets).to(device)

    def head(hidden: Tensor, weight: Tensor, _: Any, **softcap: Any) -> TokenLogProbs:
        return LogProbs()(hidden.flatten(0, 1)[predicting][None], weight, wanted, **softcap)

    log_probs, _, is_argmax = model(batch.to(device), head)
    values = torch.stack([log_probs, is_argmax.float()]).cpu().double().numpy()  # the one wait for the device
    sums, hits = np.add.reduceat(values, np.cumsum([0, *map(len, flat[:-1])]), axis=1)
    return [(float(total), hit == len(each)) for total, hit, each in zip(sums, hits.tolist(), flat, strict=True)]
