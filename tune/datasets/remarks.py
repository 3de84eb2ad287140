"""Remarks on rows that are valid, but probably not what was meant."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tune.datasets.formats.content import Chat, Row
from tune.datasets.formats.formats import Format
from tune.datasets.formats.messages import REASONING, is_empty_answer
from tune.tokenizers import Message, Tokenizer

# Columns of these names belong to what is read or said, however short their text is.
CONTENT = (
    *("system", "system_prompt", "tools", "input", "context", "history"),
    *("reasoning", "reasoning_content", "thinking"),
)
COLUMN = "column left out that holds text: "
SHARED_TOKEN = "prompt and answer share a token"


def remarks(chat: Chat, text: str, tokenizer: Tokenizer) -> list[str]:
    """On a conversation and its rendering: what the template leaves out (messages, parts of answers, tools), special
    tokens spelled out in messages (the model reads them as these tokens), answers without content, and answers that
    follow one another."""
    found = [
        f"{message['role']} left out by the template"
        for message in chat.messages
        if message["role"] != "assistant" and not _is_in(message["content"], text)
    ]
    for message in chat.messages:
        if message["role"] == "assistant":
            found += [f"{part} left out by the template" for part in _lost(message, text)]
    roles = [message["role"] for message in chat.messages]
    if ("assistant", "assistant") in pairwise(roles):
        found.append("assistant messages in a row")
    tools = [tool.get("function", tool) for tool in chat.tools or ()]
    if any(isinstance(tool, dict) and str(tool.get("name", "")) not in text for tool in tools):
        found.append("tools left out by the template")
    for message in chat.messages:
        spelled = tokenizer.special_tokens_in(message.get("content") or "")
        found += [f"{token} spelled in {message['role']} text" for token in spelled]
    if any(is_empty_answer(message) and not message["train"] for message in chat.messages):
        found.append("empty answer, not learned")
    return list(dict.fromkeys(found))


def columns_left_out(row: Row, format: Format, ignore: Sequence[str], text: str) -> list[str]:
    """A remark on each column that the format does not read although it holds text of its own: it is neither in the
    row's `text`, nor all of what is read once more (as Alpaca's `text` is)."""
    read = (*format.columns, *format.optional)
    others = {name: [*_texts(value)] for name, value in row.items() if name not in read and name not in ignore}
    others = {name: texts for name, texts in others.items() if any(name in CONTENT or _is_long(each) for each in texts)}
    if not others or not text:
        return []
    known = [each for name in read for each in _texts(row.get(name))]
    known = known if sum(map(len, known)) >= 20 else []  # shorter ones are in many a text
    return [
        COLUMN + name
        for name, texts in others.items()
        if any(not (_is_in(each, text) or (known and all(part in each for part in known))) for each in texts)
    ]


def _lost(message: Message, text: str) -> Iterator[str]:
    """Names of the parts of an assistant's message that are not in its rendering."""
    thought, end, answer = (message.get("content") or "").rpartition("</think>")
    parts = [("reasoning", message.get(name)) for name in REASONING]
    parts += [("reasoning", thought.partition("<think>")[2] if end else ""), ("a part of an answer", answer)]
    others = {"role", "content", "train", "tool_calls", *REASONING}
    rest = [(f"{name} of an answer", value) for name, value in message.items() if name not in others]
    parts += [(name, value) for name, value in rest if isinstance(value, str) and _is_long(value)]
    for name, part in parts:
        if isinstance(part, str) and not all(_is_in(line, text) for line in part.splitlines()):
            yield name


def _texts(value: Any) -> Iterator[str]:
    """The strings in a value that say something."""
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(each) if name not in ("role", "from", "type") else ()


def _is_long(text: str) -> bool:
    """Eight words, or twenty characters of a script without spaces."""
    return text.count(" ") >= 7 or len(text[:200].encode(errors="ignore")) - len(text[:200]) >= 40


def _is_in(content: str, text: str) -> bool:
    """Whether it is there, or its longest line, also as JSON has it: templates trim, and quote what tools say."""
    if content.strip() in text:
        return True
    line = max(map(str.strip, content.splitlines()), key=len, default="")
    return line in text or json.dumps(line, ensure_ascii=False)[1:-1] in text
