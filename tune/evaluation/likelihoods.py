"""Log-likelihoods of given continuations, as packed documents."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from tune.collators import Batch
from tune.distributed import World, inference
from tune.errors import TuneError
from tune.losses import LogProbs, TokenLogProbs
from tune.models import Decoder
from tune.models.context import KeyValueCache

BATCH_TOKENS = 8192  # of a forward

Ids = Sequence[int]
Group = tuple[tuple[int, ...], list[tuple[int, ...]]]  # documents, and what all of them begin with


def log_likelihoods(
    model: nn.Module, requests: Sequence[tuple[Ids, Ids]], world: World, max_length: int, batch_size: int | None = None
) -> list[tuple[float, bool]]:
    """For each of `requests`, a context and its continuation, the log-prob of the continuation, and whether each of its
    tokens is the most probable one. All processes call it with the same requests, and share them.

    Requests with the same tokens before the last one, as the choices A to D of a question, are one document; what other
    choices have in common is computed once too, where the model has a cache. A batch has `batch_size` documents, or as
    many as have `BATCH_TOKENS` tokens, the longest first. Contexts are cut from the left to `max_length` tokens. Raises
    TuneError for a continuation that is longer, and for an empty context.
    """
    inputs: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        if len(continuation) > max_length:
            raise TuneError(f"{len(continuation):,} tokens are to be predicted at once, and max_length is {max_length}")
        if continuation and not len(context):
            raise TuneError(f"request {index} has no context, of which its first token is predicted: begin it with BOS")
        if continuation:
            inputs.setdefault((*context, *continuation)[-max_length - 1 : -1], []).append(index)
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # documents by what is before all that is predicted
    for document, those in inputs.items():
        start = len(document) - max(len(requests[at][1]) for at in those)
        alike.setdefault(document[:start], []).append(document)
    groups = sorted(alike.items(), key=lambda group: -max(map(len, group[1])))[world.data_rank :: world.data_size]
    found: dict[int, tuple[float, bool]] = {}
    total, is_off = sum(len(each) for _, each in groups), None if world.is_main else True  # None: without a terminal
    bar = tqdm(total=total, desc="log-likelihoods", disable=is_off)
    with inference(model), bar:
        while groups:
            sizes = [len(each) if batch_size else sum(map(len, each)) for _, each in groups[:BATCH_TOKENS]]
            fitting = max(1, int(np.searchsorted(np.cumsum(sizes), batch_size or BATCH_TOKENS, "right")))
            batch, groups = groups[:fitting], groups[fitting:]
            indices = [inputs[each] for _, documents in batch for each in documents]
            continuations = [[requests[at][1] for at in each] for each in indices]
            answers = _forward(model, batch, continuations, world.device)
            found |= zip([at for each in indices for at in each], answers, strict=True)
            bar.update(len(indices))
    together = {index: value for each in world.all_gather(found) for index, value in each.items()}
    return [together.get(index, (0.0, True)) for index in range(len(requests))]  # an empty one has no tokens


def _forward(
    model: nn.Module, groups: list[Group], continuations: list[list[Ids]], device: torch.device
) -> list[tuple[float, bool]]:
    """Of all `continuations` of each document, whose last tokens predict them. `groups` have the documents, and what
    those of a group begin with."""
    documents = [document for _, several in groups for document in several]
    starts = np.array([len(prefix) for prefix, several in groups for _ in several])
    lengths = np.array([*map(len, documents)])
    width = int((lengths - starts).max())
    cache = None
    if starts.min() and starts.sum() - sum(len(prefix) for prefix, _ in groups) > width * len(documents):
        cache = _read(model, groups, int(starts.max()) + width, device)
    if cache is None:
        ends, ids = np.cumsum(lengths), np.arange(len(documents)).repeat(lengths)
        inputs: Batch | Tensor = Batch.of(np.concatenate(documents)[None], documents=ids[None]).to(device)
        options: dict[str, Any] = {}
    else:
        ends = np.arange(len(documents)) * width + lengths - starts
        tails = np.zeros((len(documents), width), dtype=np.int64)  # what is behind them is read by nobody
        for row, document, start in zip(tails, documents, starts, strict=True):
            row[: len(document) - start] = document[start:]
        inputs = torch.from_numpy(tails).to(device)
        options = {"positions": cache.extend(starts.tolist(), device, width), "cache": cache}
    ends = ends.repeat([len(each) for each in continuations])
    flat = [each for several in continuations for each in several]
    places = np.concatenate([np.arange(end - len(each), end) for end, each in zip(ends, flat, strict=True)])
    targets, predicting = np.concatenate(flat)[None], torch.from_numpy(places).to(device)
    wanted = Batch.of(targets, targets).to(device)

    def head(hidden: Tensor, weight: Tensor, _: Any, **softcap: Any) -> TokenLogProbs:
        return LogProbs()(hidden.flatten(0, 1)[predicting][None], weight, wanted, **softcap)

    log_probs, _, is_argmax = model(inputs, head, **options)
    values = torch.stack([log_probs, is_argmax.float()]).cpu().double().numpy()  # the one wait for the device
    sums, hits = np.add.reduceat(values, np.cumsum([0, *map(len, flat[:-1])]), axis=1)
    return [(float(total), hit == len(each)) for total, hit, each in zip(sums, hits.tolist(), flat, strict=True)]


def _read(model: nn.Module, groups: list[Group], capacity: int, device: torch.device) -> KeyValueCache | None:
    """A cache of what the documents of each group begin with; None if the model keeps no such cache."""
    if not isinstance(model, Decoder) or capacity > (model.max_generated or capacity):
        return None
    first = np.cumsum([0, *(len(several) for _, several in groups)]).tolist()
    cache = model.new_cache(first[-1], capacity)
    if not cache.keeps_all(capacity):
        return None
    prefixes = [prefix for prefix, _ in groups]
    ids = np.arange(len(prefixes)).repeat([*map(len, prefixes)])
    batch = Batch.of(np.concatenate(prefixes)[None], documents=ids[None])
    cache.start(first[:-1], batch, device)
    model(batch.to(device), cache=cache)
    cache.copy([(row, other) for row, end in itertools.pairwise(first) for other in range(row + 1, end)])
    return cache
