"""Training on what the model itself answers."""

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
    """`batch` with the last answers of a `share` of its documents replaced by what `sampler` samples from `model`. In
    these documents only the sampled tokens are supervised.

    Which documents, and what is sampled, is a function of the sampler's seed, the step and the documents' numbers in
    the dataset: all layouts and micro-batches have the same. An answer is cut before an id that is not below
    `vocab_size`, which a padded head may give. Documents without room for one keep that of the data:
    `num_without_room` of them. Columns are dropped. With `pad_to` a micro-batch is padded to a multiple of so many
    tokens: compiled blocks want few shapes. All processes must call it.
    """
    if any(micro_batch.weights is not None for micro_batch in batch.micro_batches):
        raise TuneError(
            "the rows have weights of messages or tokens, and answers that the student samples have none. Leave the "
            "weights out of the data, or set on_policy.share=0"
        )
    parts = [_documents(micro_batch) for micro_batch in batch.micro_batches]
    wanted = [
        document
        for documents in parts
        for document in documents
        if next(uniforms(sampler.seed, step, document.index, 1)) < share  # the sampler's own has 0 there
    ]
    begin = _start_of_answer
    if rehearsal.planning():  # full rows, whose last tokens are the answers
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
    """Without padding: of what is not padding, something is supervised."""
    bounds = batch.documents.boundaries.tolist()
    tokens, labels = (each.flatten().numpy() for each in (batch.tokens, batch.labels))
    return [
        Sample(tokens[start:end], labels[start:end], index)
        for start, end, index in zip(bounds[:-1], bounds[1:], batch.documents.samples.tolist(), strict=True)
        if (labels[start:end] != IGNORE).any()
    ]


def _start_of_answer(labels: np.ndarray) -> int:
    """Where the tokens begin that the last supervised labels in a row stand for; at the least 1."""
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
