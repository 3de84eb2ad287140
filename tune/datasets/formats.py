"""What a row of a dataset says: the text to tokenise and which characters of it to learn from.

A format is recognised by its columns. Each is a function from a row to a `Text`, to the reason why the row is of no
use (a string: it is dropped and counted), or to a TuneError where it is a mistake.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from tune.errors import TuneError
from tune.tokenizers import Message, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    """A text with the character spans to learn from. A `plain` one lacks BOS and EOS; a rendered chat does not.

    `endless`: the last span has no token at its end at which the model could stop.
    """

    text: str
    spans: Sequence[tuple[int, int]]
    plain: bool
    endless: bool = False


Format = Callable[[Row, Tokenizer], Text | str]


def messages(row: Row, tokenizer: Tokenizer) -> Text | str:
    """`messages`: [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}], optional `tools`."""
    return _conversation(_checked(row["messages"], "messages"), row, tokenizer)


def prompt_completion(row: Row, tokenizer: Tokenizer) -> Text | str:
    """`prompt` and `completion`: two strings, or two lists of messages. Only the completion is learned."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        prompt = [{**message, "train": False} for message in _checked(prompt, "prompt")]
        return _conversation(prompt + _checked(completion, "completion"), row, tokenizer)
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise TuneError(
                f"{name} is {_shown(value)}; prompt and completion must be two strings or two lists of messages"
            )
    if not completion:
        return "empty completion"
    return Text(prompt + completion, [(len(prompt), len(prompt) + len(completion))], plain=True)


def text(row: Row, tokenizer: Tokenizer) -> Text | str:
    """`text`: one string, learned from beginning to end."""
    if not isinstance(row["text"], str):
        raise TuneError(f"text is {_shown(row['text'])}; it must be a string")
    return Text(row["text"], [(0, len(row["text"]))], plain=True) if row["text"] else "empty text"


FORMATS: dict[tuple[str, ...], Format] = {
    ("messages",): messages,
    ("prompt", "completion"): prompt_completion,
    ("text",): text,
}


def recognise(row: Row, columns: dict[str, str], place: str) -> tuple[tuple[str, ...], Format]:
    """The format's columns and function. `columns` gives the data's name for a column of a format."""
    known = [column for format in FORMATS for column in format] + ["tools"]
    for ours, theirs in columns.items():
        if ours not in known:
            raise TuneError(
                f"columns.{ours}: no format has such a column{_did_you_mean(ours, known)}; "
                f"the formats' columns are {', '.join(known)}"
            )
        if theirs not in row:
            raise TuneError(
                f"columns.{ours}={theirs}: {place} has no such column{_did_you_mean(theirs, row)}; "
                f"it has {', '.join(row)}"
            )
    for format, function in FORMATS.items():
        if all(columns.get(column, column) in row for column in format):
            return format, function
    raise TuneError(
        f"{place}: the columns {', '.join(row) or '(none)'} are none of the known formats: "
        f"{'; '.join(' + '.join(format) for format in FORMATS)}. "
        "If a column only has another name, say so: dataset.columns.completion=answer"
    )


def renamed(row: Any, format: tuple[str, ...], columns: dict[str, str]) -> Row:
    """The row with the columns as the format calls them."""
    if not isinstance(row, dict):
        raise TuneError(f"the row is {_shown(row)}; it must be an object with columns")
    row = {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}
    missing = [columns.get(column, column) for column in format if column not in row]
    if missing:
        raise TuneError(f"no column {' and '.join(missing)} as in the rows before; it has {', '.join(row) or 'none'}")
    return row


def _conversation(messages: list[Message], row: Row, tokenizer: Tokenizer) -> Text | str:
    if not any(message["role"] == "assistant" for message in messages):
        return "no assistant message"
    rendered, spans = tokenizer.supervised_spans(messages, _tools(row.get("tools")), strftime_now=_fixed_date)
    endless = bool(spans) and not tokenizer.ends_turn(rendered[slice(*spans[-1])])
    return Text(rendered, spans, plain=False, endless=endless)


def _fixed_date(format: str) -> str:
    """Templates that print today's date (Llama 3.2) would make other data of the same file every day, and a run could
    not be resumed. This is the date they print where the clock is not given to them."""
    return datetime(2024, 7, 26).strftime(format)


def _checked(messages: Any, column: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise TuneError(f"{column} is {_shown(messages)}; it must be a list of messages")
    return [_checked_message(message, f"{column}[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise TuneError(f"{place} is {_shown(message)}; it must be an object with role and content")
    message = {key: value for key, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        if "from" in message and "value" in message:
            raise TuneError(f"{place} has `from` and `value`; it must have `role` and `content`")
        hint = _did_you_mean(str(role), ROLES)
        raise TuneError(f"{place}.role is {_shown(role)}{hint}; it must be one of {', '.join(ROLES)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise TuneError(f"{place}.content is {_shown(content)}; it must be a string")
    if not isinstance(message.get("train", True), bool):
        raise TuneError(f"{place}.train is {_shown(message['train'])}; it must be true or false")
    return message


def _tools(tools: Any) -> list | None:
    """A list of JSON schemas, also as a string (a Parquet column cannot hold schemas of several shapes otherwise)."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise TuneError(f"tools is not valid JSON: {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise TuneError(f"tools is {_shown(tools)}; it must be a list of JSON schemas")
    return tools or None


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _did_you_mean(word: str, candidates: Any) -> str:
    close = get_close_matches(word, list(candidates), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
