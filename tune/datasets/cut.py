"""Cut a conversation that is too long: after a message, or between turns. The template renders what is left again."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.block import CLIPPED, ENDS, Example
from tune.datasets.parse.content import Chat

Render = Callable[[Chat], Sample]
"""Returns the tokens and labels of a conversation of any length."""


def ends_of(chat: Chat) -> list[int]:
    """The numbers of messages after which a flagged conversation may end: those that are supervised."""
    return [end for end, message in enumerate(chat.messages, 1) if message["train"]]


def truncated(chat: Chat, whole: Sample, max_len: int, again: Render) -> Example:
    """A conversation cut after the last supervised message that fits; otherwise after `max_len` tokens."""
    if sample := _longest(chat, 0, 0, ends_of(chat), max_len, again)[1]:
        return Example(sample, ENDS, cut=len(whole.tokens) - len(sample.tokens))
    return start_of(whole, max_len)


def split_between_turns(chat: Chat, max_len: int, again: Render) -> list[Example]:
    """Split into pieces that fit, each after the system message or the prompt. Turns that do not fit are truncated."""
    roles = [message["role"] for message in chat.messages]
    head = chat.prompt or int(roles[0] == "system")
    borders = [end for end in range(head + 1, len(roles)) if roles[end] == "user"] + [len(roles)]
    start, pieces = head, []
    while borders:
        end, sample = _longest(chat, head, start, borders, max_len, again)
        if sample:
            pieces.append(Example(sample))
        else:
            end, turn = borders[0], _messages_of(chat, head, start, borders[0])
            pieces.append(truncated(turn, again(turn), max_len, again))
        start, borders = end, [border for border in borders if border > end]
    return pieces


def start_of(sample: Sample, max_len: int) -> Example:
    """The first `max_len` tokens of a sample, and none of a picture that does not fit."""
    max_len = min([max_len, *(each.start for each in sample.pictures if each.start + each.length > max_len)])
    pictures = tuple(picture for picture in sample.pictures if picture.start < max_len)
    labels = np.array(sample.labels[:max_len], dtype=np.int32)
    is_clipped = bool((labels[-1:] != IGNORE).any())
    labels[-1:] = IGNORE  # its target was cut off
    weights = None if sample.weights is None else sample.weights[:max_len]
    start = replace(sample, tokens=sample.tokens[:max_len], labels=labels, weights=weights, pictures=pictures)
    return Example(start, ENDS | (CLIPPED if is_clipped else 0), cut=len(sample.tokens) - max_len)


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
