"""Pair each labeled answer with the answer to another prompt, from which KTO estimates its reference point."""

from dataclasses import replace

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.fit import fit_group
from tune.datasets.samples import Samples, flat, joined
from tune.errors import TuneError

NO_ROOM = "an answer is left out, as a mismatched one has no room beside it"


def with_mismatched(samples: Samples, max_seq_len: int, capacity: int | None) -> Samples:
    """Group each labeled answer with a mismatched one: the same prompt with the answer of the next other prompt.

    KTO measures the distance of the policy from the reference on the log-probs of mismatched answers. In pairs, the
    chosen answer is labeled good and the rejected one bad. A sample has at most `max_seq_len` tokens, and a group at
    most `capacity` if rows are packed. Raises TuneError if there is only one prompt.
    """
    answers, source = [*samples], samples.accounting.source
    prompts = [hash(sample.tokens[: _last_of_prompt(sample) + 1].tobytes()) for sample in answers]
    if len({*prompts}) == 1 < len(prompts):
        raise TuneError(
            f"{source}: all {len(answers):,} answers belong to one prompt, but KTO compares each with an answer to "
            "another prompt. Add rows with other prompts, or use a pairwise loss such as tune.losses.DPO"
        )
    outcomes = []
    for index, (sample, other) in enumerate(zip(answers, _others(prompts), strict=True)):
        label = int(sample.columns["label"] if "label" in sample.columns else sample.columns["answer"] == 0)
        pair = [
            replace(document, columns={"label": label, "answer": answer, "group": index})
            for answer, document in enumerate((sample, _answering(sample, answers[other])))
        ]
        room = capacity - len(sample.tokens) if capacity else max_seq_len
        outcomes += fit_group(pair, [max_seq_len, max(1, room)])
    made = joined([flat(outcomes)], source)
    accounting = samples.accounting.with_samples(made.lengths, made.supervised)
    if left_out := made.accounting.dropped.total() // 2:
        accounting = accounting.with_remark(NO_ROOM, left_out)
    return replace(made, accounting=accounting)


def _others(prompts: list[int]) -> list[int]:
    """For each answer, the index of the next answer to another prompt, wrapping around at the end."""
    others = [*range(len(prompts))]
    for index in [*reversed(others)] * 2:
        following = (index + 1) % len(prompts)
        others[index] = others[following] if prompts[following] == prompts[index] else following
    return others


def _answering(sample: Sample, other: Sample) -> Sample:
    """The prompt of `sample` with the answer of `other`."""
    first, others_first = _last_of_prompt(sample), _last_of_prompt(other)
    tokens = np.concatenate([sample.tokens[: first + 1], other.tokens[others_first + 1 :]])
    labels = np.concatenate([sample.labels[:first], other.labels[others_first:]])
    return Sample(tokens, labels, place=sample.place)


def _last_of_prompt(sample: Sample) -> int:
    return int(np.flatnonzero(sample.labels != IGNORE)[0])
