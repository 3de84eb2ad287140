"""Step 4: `fit(examples, max_len, ...)` returns the samples of a row that fit, or the reason why it is dropped.

A conversation that is too long is cut after a message, and `again` renders the shorter conversation. This is the only
place where a row goes back to an earlier step.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.parse.content import Chat, Content, Dropped, Plain
from tune.datasets.render import Example
from tune.errors import TuneError

# Why rows are dropped, in addition to the reasons that a format gives with `Dropped`.
CANNOT_BE_USED = "cannot be used"
FULLY_MASKED = "fully masked"
TOO_LONG = "longer than max_seq_len"
HELD_OUT = "held out for validation"
FOR_TRAINING = "left for training"
EQUAL_AS_CUT = "chosen equal to rejected as far as they fit"  # followed by the limit
SHARED_LIMIT = "all answers to a prompt share max_seq_len, each counted with its prompt: raise it"
LEFT_OUT = "left out by "  # followed by the user's function

TooLong = Literal["truncate", "drop", "split", "error"]
Render = Callable[[Chat], Sample]
"""Returns the tokens and labels of a conversation of any length."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one row: samples, or the reason why it was dropped; and its `place`. `mistake`: why the row cannot
    be used."""

    samples: Sequence[Sample] = ()
    dropped: str | None = None
    place: str = ""
    mistake: str | None = None
    cut: int = 0  # tokens that were cut off
    clipped: bool = False  # cut inside an answer, whose end is missing
    ends: bool = True  # the token that ends the turn or text is supervised
    remarks: Sequence[str] = ()  # valid, but seldom intended
    needs: int = 0  # tokens up to and with the first supervised one, if all supervised tokens were cut off


def fit(
    examples: Sequence[Example], max_len: int, too_long: TooLong | None, again: Render, prefix: list[int], place: str
) -> Outcome:
    """Fit a row into `max_len` tokens: its one example, or its answers to one prompt.

    Answers form a group, identified by the row's `place`, with at most `max_len` tokens in total. If the group is
    longer, its longest samples are cut to a common length. If one of them has no supervised token left, the row is
    dropped. `too_long=None` splits texts and truncates everything else. If a text begins with `prefix`, so does each of
    its pieces.

    Raises:
        Dropped: the row cannot be trained on.
        TuneError: the row is too long, and `too_long` is "error".
    """
    lengths = [len(example.sample.tokens) for example in examples]
    limit = max_len
    if (total := sum(lengths)) > max_len:
        if too_long == "drop":
            raise Dropped(TOO_LONG)
        if too_long == "error":
            raise TuneError(f"the row has {total:,} tokens, more than max_seq_len={max_len}")
        limit = _shared_limit(lengths, max_len)
    outcomes = [_fit_one(example, limit, too_long, again, prefix) for example in examples]
    return outcomes[0] if len(outcomes) == 1 else _group(outcomes, place, max_len)


def fit_turns(
    examples: Sequence[Example], max_len: int, too_long: TooLong | None, again: Render, prefix: list[int], place: str
) -> Outcome:
    """Fit a row whose answers are learned one by one, each in the context in which the model is asked for it.

    Each answer is treated like a row of its own. Arguments and errors are those of `fit`.

    If a sample begins with an earlier one, the two become one sample. The remaining samples form groups of at most
    `max_len` tokens: a group is in one micro-batch, which computes a shared prefix once.
    """
    outcomes = []
    for example in examples:
        try:
            outcomes.append(fit([example], max_len, too_long, again, prefix, place))
        except Dropped as reason:
            outcomes.append(Outcome(dropped=str(reason), cut=len(example.sample.tokens)))
    whole = _joined(outcomes)
    if not whole.samples:
        return outcomes[0]
    samples = list[Sample]()
    for sample in whole.samples:
        joined = _continued(samples[-1], sample) if samples else None
        if joined:
            samples[-1] = joined
        else:
            samples.append(sample)
    number, room = 0, max_len
    for index, sample in enumerate(samples):
        if len(sample.tokens) > room:
            number, room = number + 1, max_len
        room -= len(sample.tokens)
        group = _group_number(f"{place} {number}")
        samples[index] = replace(sample, columns={**sample.columns, "group": group})
    return replace(whole, samples=samples)


def _continued(sample: Sample, longer: Sample) -> Sample | None:
    """`longer` with the labels of `sample` added, if `longer` begins with the tokens of `sample` up to its last target
    and supervises none of them. None otherwise."""
    end = int(np.flatnonzero(sample.labels != IGNORE)[-1]) + 2  # after the last target
    if len(sample.tokens) < end or not np.array_equal(sample.tokens[:end], longer.tokens[:end]):
        return None
    if (longer.labels[: end - 1] != IGNORE).any():
        return None
    labels = np.append(sample.labels[: end - 1], longer.labels[end - 1 :])
    weights = None
    if sample.weights is not None or longer.weights is not None:
        weights = np.append(sample.weights_or_ones[: end - 1], longer.weights_or_ones[end - 1 :])
    return replace(longer, labels=labels, weights=weights)


def fit_sample(sample: Sample, max_len: int) -> Outcome:
    """Truncate a finished sample to `max_len` tokens; drop it if no supervised token is left."""
    return _learned(_start(sample, max_len) if len(sample.tokens) > max_len else Outcome([sample]), sample)


def fit_group(samples: Sequence[Sample], limits: Sequence[int]) -> list[Outcome]:
    """Truncate the finished samples of a group, each to its limit. If one is dropped, all are."""
    outcomes = [fit_sample(sample, limit) for sample, limit in zip(samples, limits, strict=True)]
    reason = next((outcome.dropped for outcome in outcomes if outcome.dropped), None)
    if reason is None or len(outcomes) == 1:
        return outcomes
    dropped = Outcome(dropped=f"of a group with one that is {reason}")
    return [outcome if outcome.dropped else dropped for outcome in outcomes]


def _shared_limit(lengths: Sequence[int], max_len: int) -> int:
    """The length to which the longest samples of a group are cut, so that the group has `max_len` tokens."""
    left, limit = max_len, 0
    for number, length in enumerate(sorted(lengths)):
        limit = left // (len(lengths) - number)
        left -= min(length, limit)
    return limit


def _group(outcomes: list[Outcome], place: str, max_len: int) -> Outcome:
    """The outcome of a row with several answers to compare."""
    if dropped := [outcome for outcome in outcomes if outcome.dropped]:
        return replace(dropped[0], needs=len(outcomes) * dropped[0].needs)
    samples = [outcome.samples[0] for outcome in outcomes]
    if any(np.array_equal(samples[0].tokens, sample.tokens) for sample in samples[1:]):
        is_cut = any(outcome.cut for outcome in outcomes)
        raise Dropped(f"{EQUAL_AS_CUT} into max_seq_len={max_len}" if is_cut else "chosen equal to rejected")
    group = _group_number(place)
    samples = [replace(sample, columns={**sample.columns, "group": group}) for sample in samples]
    return replace(_joined(outcomes), samples=samples)


def _group_number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def _fit_one(example: Example, max_len: int, too_long: TooLong | None, again: Render, prefix: list[int]) -> Outcome:
    content, whole = example.content, example.sample
    if too_long is None:
        too_long = "split" if isinstance(content, Plain) and not content.prompt else "truncate"
    if len(whole.tokens) <= max_len:
        pieces = Outcome([whole])
    elif too_long != "split":
        pieces = _truncated(content, whole, max_len, again)
    elif isinstance(content, Chat):
        pieces = _split_between_turns(content, max_len, again)
    else:
        pieces = _split_anywhere(whole, max_len, prefix)
    outcome = _learned(pieces, whole)
    samples = [replace(sample, columns=content.columns) for sample in outcome.samples]
    return replace(outcome, samples=samples, remarks=example.remarks, ends=bool(pieces.cut) or example.ends)


def _truncated(content: Content, whole: Sample, max_len: int, again: Render) -> Outcome:
    """Truncate: a conversation after the last supervised message that fits; otherwise after `max_len` tokens."""
    if isinstance(content, Chat):
        ends = [end for end, message in enumerate(content.messages, 1) if message["train"]]
        if sample := _longest(content, 0, 0, ends, max_len, again)[1]:
            return Outcome([sample], cut=len(whole.tokens) - len(sample.tokens))
    return _start(whole, max_len)


def _split_between_turns(chat: Chat, max_len: int, again: Render) -> Outcome:
    """Split into pieces that fit, each after the system message or the prompt. Turns that do not fit are truncated."""
    roles = [message["role"] for message in chat.messages]
    head = chat.prompt or int(roles[0] == "system")
    borders = [end for end in range(head + 1, len(roles)) if roles[end] == "user"] + [len(roles)]
    start, pieces = head, []
    while borders:
        end, sample = _longest(chat, head, start, borders, max_len, again)
        if sample:
            pieces.append(Outcome([sample]))
        else:
            end, turn = borders[0], _messages_of(chat, head, start, borders[0])
            pieces.append(_truncated(turn, again(turn), max_len, again))
        start, borders = end, [border for border in borders if border > end]
    return _joined(pieces)


def _split_anywhere(whole: Sample, max_len: int, prefix: list[int]) -> Outcome:
    """Split into pieces that fit. The last label of a piece is the first token of the next.

    Models trained with BOS are far worse without it: if the whole begins with `prefix`, so does each piece. The token
    after the prefix is then supervised as the last label of the previous piece.
    """
    if len(prefix) >= max_len or list(whole.tokens[: len(prefix)]) != prefix:
        prefix = []
    bos, no_labels = (np.array(ids, dtype=np.int32) for ids in (prefix, [IGNORE] * len(prefix)))
    tokens, labels = whole.tokens[len(prefix) :], whole.labels[len(prefix) :]
    length = max_len - len(prefix)
    samples = []
    for start in range(0, len(tokens), length):
        piece = slice(start, start + length)
        weights = None
        if whole.weights is not None:
            weights = np.append(np.ones(len(prefix), np.float32), whole.weights[len(prefix) :][piece])
        samples.append(Sample(np.append(bos, tokens[piece]), np.append(no_labels, labels[piece]), weights=weights))
    samples[0].labels[: len(prefix)] = whole.labels[: len(prefix)]
    return Outcome(samples)


def _longest(
    chat: Chat, head: int, start: int, ends: list[int], max_len: int, again: Render
) -> tuple[int, Sample | None]:
    """The last of `ends` for which the first `head` messages and messages [start, end) fit, and their sample.

    Returns `(start, None)` if not even the first end fits.
    """
    samples: dict[int, Sample] = {}

    def length(end: int) -> int:
        samples[end] = again(_messages_of(chat, head, start, end))
        return len(samples[end].tokens)

    fitting = bisect_right(ends, max_len, key=length)
    return (ends[fitting - 1], samples[ends[fitting - 1]]) if fitting else (start, None)


def _messages_of(chat: Chat, head: int, start: int, end: int) -> Chat:
    return Chat([*chat.messages[:head], *chat.messages[start:end]], chat.tools)


def _start(sample: Sample, max_len: int) -> Outcome:
    """The first `max_len` tokens of a sample."""
    labels = np.array(sample.labels[:max_len], dtype=np.int32)
    clipped = bool(labels[-1] != IGNORE)
    labels[-1] = IGNORE  # its target was cut off
    columns = {name: value[:max_len] if np.ndim(value) else value for name, value in sample.columns.items()}
    weights = None if sample.weights is None else sample.weights[:max_len]
    start = replace(sample, tokens=sample.tokens[:max_len], labels=labels, columns=columns, weights=weights)
    return Outcome([start], cut=len(sample.tokens) - max_len, clipped=clipped)


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a row from the outcomes of its parts."""
    return Outcome(
        [sample for outcome in outcomes for sample in outcome.samples],
        cut=sum(outcome.cut for outcome in outcomes),
        clipped=any(outcome.clipped for outcome in outcomes),
        ends=all(outcome.ends for outcome in outcomes),
        remarks=list(dict.fromkeys(remark for outcome in outcomes for remark in outcome.remarks)),
    )


def _learned(pieces: Outcome, whole: Sample) -> Outcome:
    """The pieces of the whole sample that have a supervised token; dropped if there are none."""
    kept = [sample for sample in pieces.samples if (np.asarray(sample.labels) != IGNORE).any()]
    if kept:
        return replace(pieces, samples=kept)
    first = np.flatnonzero(np.asarray(whole.labels) != IGNORE)
    return replace(pieces, samples=(), dropped=FULLY_MASKED, needs=int(first[0]) + 2 if len(first) else 0)
