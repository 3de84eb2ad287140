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
from tune.distributed import World, current_world, inference
from tune.errors import TuneError
from tune.evaluation.validation import device_of
from tune.losses import LogProbs, TokenLogProbs
from tune.models import Decoder, HuggingFaceModel

BATCH_TOKENS = 8192  # of a forward

Ids = Sequence[int]


def log_likelihoods(
    model: nn.Module,
    requests: Sequence[tuple[Ids, Ids]],
    world: World | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
) -> list[tuple[float, bool]]:
    """For each of `requests`, a context and its continuation, the log-prob of the continuation, and whether each of its
    tokens is the most probable one. All processes call it with the same requests, and share them.

    Requests with the same tokens before the last one, as the choices A to D of a question, are one document. Documents
    are sorted by their tokens: those that begin alike, as a question with each of its choices, or behind the same
    examples, are then in one batch, and models of `tune.models.build` compute their beginning once. A batch has
    `batch_size` documents, or as many as have `BATCH_TOKENS` tokens. Contexts are cut from the left to `max_length`
    tokens; by default none is. `world=None` is `tune.distributed.current_world()`.

    `model` is called as `model(batch, head)`: one of `tune.models`, or one of your own that keeps documents apart.

    Raises:
        TuneError: a continuation is longer than `max_length`; a context is empty. On all processes: the log-prob of a
            continuation is NaN; the model is one of transformers that `tune.models.hf` has not wrapped; tokens see
            other documents of their batch (with `batch_size=1` there are none).
    """
    _require_documents(model)
    device, world = device_of(model, world), current_world(world)
    inputs = _by_input(requests, max_length)
    mine = _own_share(sorted(inputs), world)
    answers: dict[int, tuple[float, bool]] = {}
    difference = 0.0, 0.0
    is_off = None if world.is_main else True  # None: without a terminal
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
            f"the log-probs of {len(broken)} of {len(requests)} texts are NaN, as weights or activations are. Go back "
            "to an earlier checkpoint, or use dtype=fp32"
        )
    return [together.get(index, (0.0, True)) for index in range(len(requests))]  # an empty one has no tokens


def _by_input(requests: Sequence[tuple[Ids, Ids]], max_length: int | None) -> dict[tuple[int, ...], list[int]]:
    """The tokens that the model reads of requests, and the indices of those that read the same."""
    inputs: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        if max_length is not None and len(continuation) > max_length:
            raise TuneError(f"{len(continuation):,} tokens are to be predicted at once, and max_length is {max_length}")
        if continuation and not len(context):
            raise TuneError(f"request {index} has no context, of which its first token is predicted: begin it with BOS")
        if continuation:
            tokens = (*context, *continuation)[:-1]
            inputs.setdefault(tokens if max_length is None else tokens[-max_length:], []).append(index)
    return inputs


def _own_share(documents: list[tuple[int, ...]], world: World) -> list[tuple[int, ...]]:
    """The documents of this process, each of which has about as many tokens."""
    ends = np.cumsum([0, *map(len, documents)])
    bounds = ends[-1] * np.array([world.data_rank, world.data_rank + 1]) / world.data_size
    return documents[slice(*np.searchsorted(ends, bounds))]


def _require_own_documents(model: nn.Module, differences: Sequence[tuple[float, float]]) -> None:
    """Raises TuneError if hidden states of a document differ by more than their limit beside another document."""
    if different := [by for by, limit in differences if by > limit]:
        raise TuneError(
            f"model: in {type(model).__name__} the tokens of a document see other documents of the batch: its hidden "
            f"states differ by {max(different):.1%} from those that it has alone. Keep attention within "
            "batch.documents and count positions by batch.positions, or give batch_size=1"
        )


def _require_documents(model: nn.Module) -> None:
    """Raises TuneError for a model that is not called with a `Batch`."""
    if hasattr(model, "get_output_embeddings") and not isinstance(model, HuggingFaceModel):
        name = type(model).__name__
        raise TuneError(f"model: {name} of transformers takes no batch of documents. Wrap it with tune.models.hf")


def _difference_beside_another(
    model: nn.Module, first: tuple[int, ...], second: tuple[int, ...], device: torch.device
) -> tuple[float, float]:
    """The relative difference of the hidden states of the `second` document from those it has alone, when it follows
    the `first` in a batch, and the most that rounding makes."""

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
