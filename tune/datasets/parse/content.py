"""The contents of rows: a conversation, a text, or tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tune.errors import TuneError
from tune.tokenizers import Message

Row = dict[str, Any]
"""A row of a file: column -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """The fields of every content: `columns` with which a method compares answers, and the texts of `unread` columns,
    which the format does not read."""

    columns: Mapping[str, float] = field(default_factory=dict)
    unread: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chat(_Said):
    """A conversation. Its first `prompt` messages are not supervised, nor are messages with `train: false`.

    A number between 0 and 1 in `train` is the weight of the message.
    """

    messages: list[Message]
    tools: list | None = None
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Plain(_Said):
    """A supervised text that continues a prompt, which may be empty; both without BOS and EOS."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Tokens(_Said):
    """Token ids with labels (the same id where supervised, else -100; not shifted) and weights (None: all 1)."""

    ids: list[int]
    labels: list[int]
    weights: list[float] | None = None


class Dropped(Exception):
    """A row cannot be trained on, for the reason in the message. It is dropped and counted."""


Content = Chat | Plain | Tokens
"""The content of one sample."""


def require(is_right: bool, place: str, value: Any, kind: str) -> None:
    """Raise TuneError unless `is_right`: the value at `place` must be of this `kind`."""
    if not is_right:
        raise TuneError(f"{place} is {shown(value)}; it must be {kind}")


def require_weight(weight: Any, place: str) -> None:
    """Raise TuneError unless the weight at `place` is a number from 0 to 1."""
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    require(is_number and 0 <= weight <= 1, place, weight, "a number from 0 (not trained on) to 1")


def shown(value: Any) -> str:
    """A value as short text for a message."""
    if value is None:
        return "missing"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
