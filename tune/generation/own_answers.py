"""Train on the model's own answers."""

import math
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from typing import Any

import numpy as np
from torch import nn

from tune import rehearsal
from tune.collators import IGNORE, Batch, Sample, collate
from tune.datasets import GlobalBatch
from tune.distributed import World
from tune.errors import TuneError
from tune.generation.sampler import Sampler, uniforms
from tune.types import UnitInterval


def own_answers(
    batch: GlobalBatch, model: nn.Module, sampler: Sampler, world: World, *,
    step: int, share: UnitInterval, vocab_size: int, pad_to: int | None = None,
) -> GlobalBatch:  # fmt: skip
    """Replace the last answers of a `share` of the documents of `batch` by samples of `sampler` from `model`. In these
    documents only the sampled tokens are supervised.

    The choice of documents and the samples are a function of the sampler's seed, the step and the documents' indices in
    the dataset, and so independent of layouts and micro-batches. An answer is cut before an id that is not below
    `vocab_size`, which a padded head may produce. Documents without room for an answer keep the answer of the data;
    `num_without_room` counts them. Columns are dropped. With `pad_to`, a micro-batch is padded to a multiple of
    `pad_to` tokens, since compiled blocks need few shapes. All processes must call this.
    """
    if any(micro_batch.weights is not None for micro_batch in batch.micro_batches):
        raise TuneError(
            "on_policy.share: the rows have weights of messages or tokens, but sampled answers have none. Remove the "
            "weights from the data, or set on_policy.share=0"
        )
    parts = [_documents(micro_batch) for micro_batch in batch.micro_batches]
    wanted = [
        document
        for documents in parts
        for document in documents
        if next(uniforms(sampler.seed, step, document.index, 1)) < share  # the sampler's draws have 0 as last key
    ]
    begin = _start_of_answer
    if rehearsal.planning():  # rows are full; treat their last tokens as answers
        documents = [*chain(*parts)]
        wanted = documents[: math.ceil(share * len(documents))]
        begin = partial(_start_of_full_answer, max_new_tokens=sampler.max_new_tokens)
    chosen = [each for each in wanted if begin(each.labels) <= sampler.room(model)]
    prompts = [document.tokens[: begin(document.labels)] for document in chosen]
    indices = [document.index for document in chosen]
    completions = sampler(model, [prompt.tolist() for prompt in prompts], step=step, indices=indices)
    answered = {
        id(document): _answered(document.index, prompt, list(takewhile(vocab_size.__gt__, completion.tokens)))
        for document, prompt, (completion,) in zip(chosen, prompts, completions, strict=True)
    }
    rows = [[answered.get(id(each), each) for each in documents] for documents in parts]
    lengths = [max(1, sum(len(each.tokens) for each in row)) for row in rows]
    padding = [-length % (pad_to or 1) for length in lengths]
    micro_batches = [collate([row], sum(each)) for row, *each in zip(rows, lengths, padding, strict=True)]
    counts = world.fetch(
        num_tokens=world.sum(sum(each.num_tokens for each in micro_batches)),
        num_supervised=world.sum(sum(each.num_supervised for each in micro_batches)),
        num_without_room=world.sum(len(wanted) - len(chosen)),
    )
    whole: dict[str, Any] = {name: int(count) for name, count in counts.items()}
    of_step = {"supervised_in_step": whole["num_supervised"]}
    micro_batches = [
        replace(answers, step_seed=before.step_seed, **of_step)
        for before, answers in zip(batch.micro_batches, micro_batches, strict=True)
    ]
    return replace(batch, micro_batches=micro_batches, **whole)


def _documents(batch: Batch) -> list[Sample]:
    """Return the documents of a batch without padding; documents without supervised tokens are padding."""
    bounds = batch.documents.boundaries.tolist()
    tokens, labels = (each.flatten().numpy() for each in (batch.tokens, batch.labels))
    return [
        Sample(tokens[start:end], labels[start:end], index, place=place)
        for start, end, index, place in zip(
            bounds[:-1], bounds[1:], batch.documents.samples.tolist(), batch.places, strict=True
        )
        if (labels[start:end] != IGNORE).any()
    ]


def _start_of_answer(labels: np.ndarray) -> int:
    """Return the start of the last answer: the tokens of the last run of supervised labels. At least 1."""
    learned = np.flatnonzero(labels != IGNORE)
    gaps = np.flatnonzero(np.diff(learned) > 1)
    return int(learned[gaps[-1] + 1 if len(gaps) else 0]) + 1


def _start_of_full_answer(labels: np.ndarray, max_new_tokens: int) -> int:
    return max(1, len(labels) - max_new_tokens)


def _answered(index: int, prompt: np.ndarray, answer: list[int]) -> Sample:
    tokens = np.array([*prompt, *answer])
    labels = np.full(len(tokens), IGNORE)
    labels[len(prompt) - 1 : -1] = answer
    return Sample(tokens, labels, index)
