"""Log-likelihoods of given continuations, as packed documents."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from tune.collators import Batch
from tune.distributed import World, gathered
from tune.errors import TuneError
from tune.losses import LogProbs, TokenLogProbs

BATCH_TOKENS = 8192  # of a forward

Ids = Sequence[int]


@torch.no_grad()
def log_likelihoods(
    model: nn.Module, requests: Sequence[tuple[Ids, Ids]], world: World, max_length: int, batch_size: int | None = None
) -> list[tuple[float, bool]]:
    """For each of `requests`, a context and its continuation, the log-prob of the continuation, and whether each of its
    tokens is the most probable one. All processes call it with the same requests, and share them.

    Requests with the same tokens before the last one, as the choices A to D of a question, are one document. A batch
    has `batch_size` of them, or as many as have `BATCH_TOKENS` tokens, the longest first. Contexts are cut from the
    left to `max_length` tokens. Raises TuneError for a continuation that is longer, and for an empty context.
    """
    inputs: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        if len(continuation) > max_length:
            raise TuneError(f"{len(continuation):,} tokens are to be predicted at once, and max_length is {max_length}")
        if continuation and not len(context):
            raise TuneError(f"request {index} has no context, of which its first token is predicted: begin it with BOS")
        if continuation:
            inputs.setdefault((*context, *continuation)[-max_length - 1 : -1], []).append(index)
    mine = sorted(inputs, key=len, reverse=True)[world.data_rank :: world.data_size]
    found: dict[int, tuple[float, bool]] = {}
    training = model.training
    model.eval()
    bar = tqdm(total=len(mine), desc="log-likelihoods", disable=None if world.is_main else True)  # None: no terminal
    try:  # nothing is compiled: blocks would be, for every number of tokens
        with gathered(model), torch.compiler.set_stance("eager_on_recompile"), bar:
            while mine:
                fitting = np.searchsorted(np.cumsum([len(each) for each in mine[:BATCH_TOKENS]]), BATCH_TOKENS, "right")
                batch = mine[: batch_size or max(1, int(fitting))]
                indices = [[*inputs[each]] for each in batch]
                answers = _forward(model, batch, [[requests[at][1] for at in each] for each in indices], world.device)
                found |= zip([at for each in indices for at in each], answers, strict=True)
                mine = mine[len(batch) :]
                bar.update(len(batch))
    finally:
        model.train(training)
    together = {index: value for each in world.all_gather(found) for index, value in each.items()}
    return [together.get(index, (0.0, True)) for index in range(len(requests))]  # an empty one has no tokens


def _forward(
    model: nn.Module, documents: list[tuple[int, ...]], continuations: list[list[Ids]], device: torch.device
) -> list[tuple[float, bool]]:
    """Of all `continuations` of each of `documents`, whose last tokens predict them."""
    lengths = [len(document) for document in documents]
    ends = np.cumsum(lengths).repeat([len(each) for each in continuations])
    flat = [each for several in continuations for each in several]
    places = np.concatenate([np.arange(end - len(each), end) for end, each in zip(ends, flat, strict=True)])
    targets, predicting = np.concatenate(flat)[None], torch.from_numpy(places).to(device)
    wanted = Batch.of(targets, targets).to(device)

    def head(hidden: Tensor, weight: Tensor, _: Batch, **options: Any) -> TokenLogProbs:
        return LogProbs()(hidden.flatten(0, 1)[predicting][None], weight, wanted, **options)

    ids = np.arange(len(documents)).repeat(lengths)
    log_probs, _, is_argmax = model(Batch.of(np.concatenate(documents)[None], documents=ids[None]).to(device), head)
    values = torch.stack([log_probs, is_argmax.float()]).cpu().double().numpy()  # the one wait for the device
    sums, hits = np.add.reduceat(values, np.cumsum([0, *map(len, flat[:-1])]), axis=1)
    return [(float(total), hit == len(each)) for total, hit, each in zip(sums, hits.tolist(), flat, strict=True)]
