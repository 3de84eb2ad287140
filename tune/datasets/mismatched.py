"""Pair each labeled answer with the answer to another prompt, from which KTO estimates its reference point."""

from dataclasses import replace

import numpy as np

from tune.collators import IGNORE
from tune.datasets.samples import Samples
from tune.errors import TuneError

NO_ROOM = "an answer is left out, as a mismatched one has no room beside it"


def with_mismatched(samples: Samples, max_seq_len: int, capacity: int | None) -> Samples:
    """Group each labeled answer with a mismatched one: the same prompt with the answer of the next other prompt.

    KTO measures the distance of the policy from the reference on the log-probs of mismatched answers. In pairs, the
    chosen answer is labeled good and the rejected one bad. A sample has at most `max_seq_len` tokens, and a group at
    most `capacity` if rows are packed. A mismatched answer is two spans of stored tokens: it is made when it is drawn.
    Raises TuneError if there is only one prompt.
    """
    source, count = samples.accounting.source, len(samples)
    prompts = samples.prompts
    if count > 1 and (prompts == prompts[0]).all():
        raise TuneError(
            f"{source}: all {count:,} answers belong to one prompt, but KTO compares each with an answer to "
            "another prompt. Add rows with other prompts, or use a pairwise loss such as tune.losses.DPO"
        )
    others = _others(prompts)
    if samples.spans is not None:
        raise AssertionError("labeled answers are not split")
    # Span 0 of a pair is the answer, spans 1 and 2 are the prompt and the mismatched answer.
    head = samples.firsts + 1
    tail = (samples.lengths - head)[others]
    room = (capacity - samples.lengths) if capacity else np.full(count, max_seq_len)
    room = np.clip(room, 1, max_seq_len)
    is_cut = head + tail > room
    lengths = np.minimum(head + tail, room)
    supervised = samples.supervised[others].copy()
    for index in np.flatnonzero(is_cut).tolist():
        other = int(others[index])
        start = int(samples.starts[other] + samples.firsts[other])
        seen = max(0, int(lengths[index]) - 1 - int(samples.firsts[index]))
        labels = samples.blocks[samples.stores[other]].labels[start : start + seen]
        supervised[index] = np.count_nonzero(labels != IGNORE)
    fits = supervised > 0
    kept = np.flatnonzero(fits)

    def pairs(answers: np.ndarray, mismatched: np.ndarray) -> np.ndarray:
        return np.stack([answers[kept], mismatched[kept].astype(answers.dtype)], axis=1).reshape(-1)

    def spans(answers: np.ndarray, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
        return np.stack([each[kept].astype(answers.dtype) for each in (answers, prompt, answer)], axis=1).reshape(-1)

    if not len(kept):
        least = int((samples.lengths + head).min()) + 1  # an answer, its prompt again, and a token
        raise TuneError(
            f"{source}: no answer has room for a mismatched one in the same packed row. Set packed=false, or raise "
            f"max_seq_len to {least} or more"
        )
    good = samples.columns["label"] if "label" in samples.columns else samples.columns["answer"] == 0
    answers = np.tile(np.array([0, 1]), len(kept))
    made = replace(
        samples,
        stores=spans(samples.stores, samples.stores, samples.stores[others]),
        starts=spans(samples.starts, samples.starts, (samples.starts + head)[others]),
        span_lengths=spans(samples.span_lengths, np.minimum(head, lengths), np.maximum(lengths - head, 0)),
        spans=np.append(np.arange(0, 3 * len(kept), 3).repeat(2) + np.tile([0, 1], len(kept)), 3 * len(kept)),
        is_cut=pairs(samples.is_cut, is_cut | samples.is_cut[others]),
        lengths=pairs(samples.lengths, lengths),
        supervised=pairs(samples.supervised, supervised),
        weight=pairs(samples.weight, supervised),
        digests=pairs(samples.digests, np.zeros(count, np.uint64)),
        firsts=pairs(samples.firsts, samples.firsts),
        numbers=pairs(samples.numbers, samples.numbers),
        pieces=pairs(samples.pieces, samples.pieces),
        columns={"label": good.astype(np.int64)[kept].repeat(2), "answer": answers, "group": kept.repeat(2)},
    )
    accounting = samples.accounting.with_samples(made.lengths, made.supervised)
    if left_out := count - len(kept):
        accounting = accounting.with_remark(NO_ROOM, left_out)
    return replace(
        made, accounting=accounting, fingerprint=f"{samples.fingerprint}, mismatched {max_seq_len} {capacity}"
    )


def _others(prompts: np.ndarray) -> np.ndarray:
    """For each answer, the index of the next answer to another prompt, wrapping around at the end."""
    count = len(prompts)
    changes = np.flatnonzero(prompts != np.roll(prompts, -1)) + 1  # the answer after each run of one prompt
    if not len(changes):
        return np.arange(count)
    following = np.searchsorted(changes, np.arange(count), side="right")
    return changes[following % len(changes)] % count
