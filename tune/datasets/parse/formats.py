"""The formats of rows: each is a function that parses a row into its contents.

A function raises Dropped for a row that cannot be trained on, and TuneError for an invalid row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from tune.collators import IGNORE
from tune.datasets.parse.content import Chat, Content, Dropped, Plain, Row, Tokens, require, require_weight, shown
from tune.datasets.parse.messages import checked_messages, checked_tools, conversation, is_empty_answer, question_of
from tune.datasets.parse.preferences import graded, instructed, labelled, preference
from tune.errors import TuneError


def chat(row: Row, column: str = "messages") -> list[Content]:
    """`messages` as OpenAI and Hugging Face have them, optional `tools` and `system`."""
    if row[column] in (None, "", "[]", []):
        raise Dropped(f"empty {column}")
    return [Chat(conversation(row, column), checked_tools(row.get("tools")))]


def sharegpt(row: Row) -> list[Content]:
    """`conversations` of `from` and `value`, optional `tools` and `system`."""
    return chat(row, "conversations")


def alpaca(row: Row) -> list[Content]:
    """`instruction` and `output`, optional `input` (appended to the instruction) and `system`: a chat of one turn."""
    require(isinstance(row["output"], str | None), "output", row["output"], "a string")
    question = question_of(row)
    if not (question and row["output"]):
        raise Dropped("empty instruction" if row["output"] else "empty output")
    turn = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return [Chat(conversation({**row, "messages": turn}, "messages"))]


def prompt_completion(row: Row) -> list[Content]:
    """`prompt` and `completion`: two strings, or two lists of messages (optional `tools`)."""
    prompt, answer = row["prompt"], row["completion"]
    if answer is None or answer in ("", []):
        raise Dropped("empty completion")
    if isinstance(prompt, list) and isinstance(answer, list):
        before, behind = checked_messages(prompt, "prompt"), checked_messages(answer, "completion")
        if all(map(is_empty_answer, behind)):
            raise Dropped("empty completion")
        return [Chat(before + behind, checked_tools(row.get("tools")), prompt=len(before))]
    for name, value in (("prompt", prompt), ("completion", answer)):
        kind = "a string: prompt and completion are two strings or two lists of messages"
        require(isinstance(value, str), name, value, kind)
    return [Plain(prompt, answer)]


def text(row: Row) -> list[Content]:
    """`text`: one string, supervised from beginning to end."""
    require(isinstance(row["text"], str | None), "text", row["text"], "a string")
    if not row["text"]:
        raise Dropped("empty text")
    return [Plain("", row["text"])]


def tokens(row: Row) -> list[Content]:
    """`input_ids` with optional columns of the same length; alone, all tokens are supervised.

    - `labels`: the same ids, not shifted, or -100 for tokens that are not supervised
    - `completion_mask`, `assistant_masks`: 1 for supervised tokens, else 0
    - `attention_mask`: 0 for padding, which is removed
    - `weights`: from 0 (not supervised) to 1
    """
    ids = _ids(row, "input_ids")
    if not ids:
        raise Dropped("empty input_ids")
    columns = {name: _ids(row, name) for name in ("labels", *MASKS) if row.get(name) is not None}
    for name, values in columns.items():
        if len(values) != len(ids):
            raise TuneError(f"{name} has {len(values)} entries for {len(ids)} input_ids")
        if name != "labels" and not {*values} <= {0, 1}:
            raise TuneError(f"{name} holds {shown(sorted({*values} - {0, 1})[0])}; it must hold 1 and 0")
    if min(ids) < 0 or max(ids) >= 2**31:
        raise TuneError(f"input_ids holds {min(ids) if min(ids) < 0 else max(ids)}, which is not a token id")
    labels = columns.get("labels", ids)
    if wrong := next((pair for pair in zip(ids, labels, strict=True) if pair[1] not in (IGNORE, pair[0])), None):
        raise TuneError(
            f"labels has {wrong[1]} where input_ids has {wrong[0]}; it must have the same token (not the next) or "
            f"{IGNORE}"
        )
    for mask in (columns[name] for name in LEARNED if name in columns):
        labels = [label if on else IGNORE for label, on in zip(labels, mask, strict=True)]
    weights = _weights(row["weights"], len(ids)) if row.get("weights") is not None else None
    if weights is not None:
        labels = [label if weight else IGNORE for label, weight in zip(labels, weights, strict=True)]
    if "attention_mask" in columns:
        kept = _without_padding(columns["attention_mask"])
        ids, labels, weights = ids[kept], labels[kept], weights and weights[kept]
    return [Tokens(ids, labels, weights)]


LEARNED = ("completion_mask", "assistant_masks")
MASKS = ("attention_mask", *LEARNED)


@dataclass(frozen=True, slots=True)
class Format:
    """A format: `parse` needs `columns`, reads `optional` ones, and returns one content, or one for each answer."""

    name: str
    parse: Callable[[Row], list[Content]]
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()
    is_chat: bool = False


Kind = Literal["supervised", "preferences", "graded", "labelled"]
"""What rows teach: their text, which of several answers is better, by how much, or whether an answer is good."""

SUPERVISED = (
    Format("chat", chat, ("messages",), ("tools", "system"), is_chat=True),
    Format("sharegpt", sharegpt, ("conversations",), ("tools", "system"), is_chat=True),
    Format("prompt_completion", prompt_completion, ("prompt", "completion"), ("tools",)),
    Format("alpaca", alpaca, ("instruction", "output"), ("input", "system"), is_chat=True),
    Format("tokens", tokens, ("input_ids",), ("labels", *MASKS, "weights")),
    Format("text", text, ("text",)),
)
PREFERENCES = (
    Format("instruction_preference", instructed, ("instruction", "chosen", "rejected"), ("input", "system"), True),
    Format("preference", preference, ("chosen", "rejected"), ("prompt", "system", "tools")),
)
GRADED = tuple(replace(pairs, parse=graded(pairs.parse), optional=(*pairs.optional, "margin")) for pairs in PREFERENCES)
LABELLED = (
    Format("labelled_completion", labelled(prompt_completion), ("prompt", "completion", "label"), ("tools",)),
    Format("labelled_chat", labelled(chat), ("messages", "label"), ("tools", "system"), is_chat=True),
    Format("labelled_alpaca", labelled(alpaca), ("instruction", "output", "label"), ("input", "system"), True),
)
FORMATS = {
    "supervised": SUPERVISED,
    "preferences": PREFERENCES,
    "graded": GRADED,
    "labelled": (*LABELLED, *PREFERENCES),  # in a pair, the chosen answer is good and the rejected one bad
}
"""The formats that `dataset.format` can name, by kind, in the order in which they are tried."""


def _ids(row: Row, column: str) -> list[int]:
    values = row[column]
    is_right = isinstance(values, list) and all(type(value) is int for value in values)
    require(is_right, column, values, "a list of integers")
    return values


def _weights(values: Any, length: int) -> list[float]:
    require(isinstance(values, list), "weights", values, "a list with a number for each of the input_ids")
    if len(values) != length:
        raise TuneError(f"weights has {len(values)} entries for {length} input_ids")
    for index, weight in enumerate(values):
        require_weight(weight, f"weights[{index}]")
    return values


def _without_padding(mask: list[int]) -> slice:
    """The slice of tokens that are not padding."""
    if 1 not in mask:
        raise TuneError("attention_mask is 0 everywhere: the row is all padding")
    start, end = mask.index(1), len(mask) - mask[::-1].index(1)
    if 0 in mask[start:end]:
        raise TuneError(
            f"attention_mask[{start + mask[start:end].index(0)}] is 0 between tokens; padding must be at the ends"
        )
    return slice(start, end)
