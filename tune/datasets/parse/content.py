"""What a row can say: a conversation, a text, or tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tune.errors import TuneError
from tune.tokenizers import Message

Row = dict[str, Any]
"""A row of a file: values by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a content has whatever it is: the `columns` by which a method compares answers, and by its name the `unread`
    texts of each column that the format does not read."""

    columns: Mapping[str, float] = field(default_factory=dict)
    unread: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chat(_Said):
    """A conversation; its first `prompt` messages are read and not learned, as are those with `train: false`. A number
    between 0 and 1 in `train` is how much the message counts."""

    messages: list[Message]
    tools: list | None = None
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Plain(_Said):
    """A text that continues a prompt, which may be empty, without BOS and EOS. The text is learned."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Tokens(_Said):
    """Token ids, and for each the same id if it is learned or -100, and how much it counts; None: all alike."""

    ids: list[int]
    labels: list[int]
    weights: list[float] | None = None


class Dropped(Exception):
    """A row is of no use; the message says why. It is dropped and counted."""


Content = Chat | Plain | Tokens
"""What is read and learned as one sample."""


def require(is_right: bool, place: str, value: Any, kind: str) -> None:
    """Raises TuneError unless it `is_right`: the value there must be of this kind."""
    if not is_right:
        raise TuneError(f"{place} is {shown(value)}; it must be {kind}")


def require_weight(weight: Any, place: str) -> None:
    """Raises TuneError unless the weight there is a number from 0 to 1."""
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    require(is_number and 0 <= weight <= 1, place, weight, "a number from 0 (not learned) to 1")


def shown(value: Any) -> str:
    """A value for a message."""
    if value is None:
        return "missing"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
