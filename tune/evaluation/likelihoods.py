"""Compute log-likelihoods of given continuations in packed documents."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from tune.collators import IGNORE, Batch, Sample, collate
from tune.distributed import World, current_world, inference
from tune.errors import TuneError
from tune.evaluation.validation import device_of
from tune.losses import LogProbs, TokenLogProbs
from tune.models import Decoder, HuggingFaceModel

BATCH_TOKENS = 8192  # tokens of a forward

Ids = Sequence[int]


def log_likelihoods(
    model: nn.Module,
    requests: Sequence[tuple[Ids, Ids]],
    world: World | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
) -> list[tuple[float, bool]]:
    """Return, for each of `requests` (context, continuation), the log-prob of the continuation and whether each of its
    tokens is the most probable one. All processes must call this with the same requests, which are divided among them.

    Requests that differ only in the last token, such as the choices A to D of a question, are one document. Documents
    are sorted by their tokens, so those with the same beginning are in one batch, and models of `tune.models.build`
    compute the beginning once. A batch has `batch_size` documents, or as many as fit into `BATCH_TOKENS` tokens.
    Contexts are cut from the left to `max_length` tokens (default: not cut). `world=None` uses
    `tune.distributed.current_world()`.

    `model` is called as `model(batch, head)`: a model of `tune.models`, or your own model that keeps documents apart.

    Raises:
        TuneError: a continuation is longer than `max_length`, or a context is empty. On all processes: the log-prob of
            a continuation is NaN; a model of transformers is not wrapped by `tune.models.hf`; tokens attend to other
            documents of their batch (not checked with `batch_size=1`).
    """
    _require_documents(model)
    device, world = device_of(model, world), current_world(world)
    inputs = _by_input(requests, max_length)
    mine = _own_share(sorted(inputs), world)
    answers: dict[int, tuple[float, bool]] = {}
    difference = 0.0, 0.0
    is_off = None if world.is_main else True  # None: no bar without a terminal
    with inference(model), tqdm(total=len(mine), desc="log-likelihoods", disable=is_off) as bar:
        if batch_size != 1 and len(mine) > 1 and not isinstance(model, Decoder | HuggingFaceModel):
            difference = _difference_beside_another(model, mine[0], mine[1], device)
        while mine:
            sizes = np.cumsum([1 if batch_size else len(document) for document in mine[:BATCH_TOKENS]])
            fitting = max(1, int(np.searchsorted(sizes, batch_size or BATCH_TOKENS, "right")))
            documents, mine = mine[:fitting], mine[fitting:]
            indices = [inputs[document] for document in documents]
            continuations = [[requests[index][1] for index in same] for same in indices]
            answers |= zip(itertools.chain(*indices), _forward(model, documents, continuations, device), strict=True)
            bar.update(len(documents))
    gathered = world.all_gather((answers, difference))
    _require_own_documents(model, [difference for _, difference in gathered])
    together = {index: answer for part, _ in gathered for index, answer in part.items()}
    if broken := [index for index, (value, _) in together.items() if math.isnan(value)]:
        raise TuneError(
            f"the log-probs of {len(broken)} of {len(requests)} texts are NaN, so weights or activations are too. Use "
            "an earlier checkpoint, or dtype fp32"
        )
    return [together.get(index, (0.0, True)) for index in range(len(requests))]  # an empty continuation has no tokens


def _by_input(requests: Sequence[tuple[Ids, Ids]], max_length: int | None) -> dict[tuple[int, ...], list[int]]:
    """Map the tokens that the model reads to the indices of the requests that share them."""
    inputs: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        if max_length is not None and len(continuation) > max_length:
            raise TuneError(f"a continuation has {len(continuation):,} tokens, more than max_length={max_length}")
        if continuation and not len(context):
            raise TuneError(f"request {index} has no context to predict its first token from: begin it with BOS")
        if continuation:
            tokens = (*context, *continuation)[:-1]
            inputs.setdefault(tokens if max_length is None else tokens[-max_length:], []).append(index)
    return inputs


def _own_share(documents: list[tuple[int, ...]], world: World) -> list[tuple[int, ...]]:
    """Return this process's documents; all processes get about the same number of tokens."""
    ends = np.cumsum([0, *map(len, documents)])
    bounds = ends[-1] * np.array([world.data_rank, world.data_rank + 1]) / world.data_size
    return documents[slice(*np.searchsorted(ends, bounds))]


def _require_own_documents(model: nn.Module, differences: Sequence[tuple[float, float]]) -> None:
    """Raise TuneError if the hidden states of a document change by more than their limit next to another document."""
    if different := [by for by, limit in differences if by > limit]:
        raise TuneError(
            f"model: in {type(model).__name__} tokens see other documents of the batch: hidden states of a document "
            f"differ by {max(different):.1%} from those that it has alone. Keep attention within batch.documents and "
            "use batch.positions, or set batch_size=1"
        )


def _require_documents(model: nn.Module) -> None:
    """Raise TuneError for a model that does not accept a `Batch`."""
    if hasattr(model, "get_output_embeddings") and not isinstance(model, HuggingFaceModel):
        name = type(model).__name__
        raise TuneError(f"model: {name} of transformers does not accept a Batch. Wrap it with tune.models.hf")


def _difference_beside_another(
    model: nn.Module, first: tuple[int, ...], second: tuple[int, ...], device: torch.device
) -> tuple[float, float]:
    """Return the relative difference of the `second` document's hidden states alone and after the `first` in a batch,
    and the limit that rounding explains."""

    def hidden_of(*documents: tuple[int, ...]) -> Tensor:
        unlabelled = [Sample(np.array(each), np.full(len(each), IGNORE)) for each in documents]
        hidden: Tensor = model(collate([unlabelled]).to(device), lambda hidden, *_, **softcap: hidden)
        return hidden.flatten(0, 1)[-len(second) :]

    alone, together = hidden_of(second).float(), hidden_of(first, second)
    limit = 1e-3 if together.dtype == torch.float32 else 5e-2
    return float((together.float() - alone).norm() / alone.norm()), limit


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
