"""Remarks on rows that are valid but probably not intended."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise

from tune.datasets.parse.columns import NOTHING, is_long
from tune.datasets.parse.content import Chat, Content
from tune.datasets.parse.messages import READ, REASONING, is_empty_answer
from tune.datasets.parse.pictures import text_of, texts_of
from tune.tokenizers import Message, Tokenizer

COLUMN = "column left out that holds text: "
UNREAD_KEY = "key of a message that neither tune nor the chat template reads: "
LOST = "left out by the template"
REASONING_LOST = f"reasoning {LOST}"
SHARED_TOKEN = "prompt and answer share a token"


def remarks(content: Content, text: str, tokenizer: Tokenizer) -> list[str]:
    """Remarks on a content and its rendering: parts that the chat template leaves out, unusual conversations, and
    columns with text that is neither read nor rendered."""
    of_chat = _of_chat(content, text, tokenizer) if isinstance(content, Chat) else []
    if not text:  # tokens
        return of_chat
    unread = {name: [part for part in texts if not _is_in(part, text)] for name, texts in content.unread.items()}
    return of_chat + [COLUMN + name for name, texts in unread.items() if texts]


def _of_chat(chat: Chat, text: str, tokenizer: Tokenizer) -> list[str]:
    """Remarks on a conversation.

    They cover parts that the template leaves out (messages, parts of answers, tools), special tokens spelled out in
    messages (the model reads them as special tokens), empty answers, and consecutive answers.
    """
    notes = [
        f"{message['role']} {LOST}"
        for message in chat.messages
        if message["role"] != "assistant" and not all(_is_in(part, text) for part in texts_of(message))
    ]
    for message in chat.messages:
        if message["role"] == "assistant":
            notes += [f"{part} {LOST}" for part in _lost(message, text)]
    keys = {key for message in chat.messages for key, value in message.items() if value not in NOTHING} - READ
    of_template = f"{tokenizer.chat_template} {text}"  # a template may also show all keys
    unread = [key for key in sorted(keys) if not re.search(rf"\b{re.escape(key)}\b", of_template)]
    notes += [f"{UNREAD_KEY}{key}" for key in unread if f"{key} of an answer {LOST}" not in notes]
    roles = [message["role"] for message in chat.messages]
    if ("assistant", "assistant") in pairwise(roles):
        notes.append("assistant messages in a row")
    tools = [tool.get("function", tool) for tool in chat.tools or ()]
    if any(isinstance(tool, dict) and str(tool.get("name", "")) not in text for tool in tools):
        notes.append(f"tools {LOST}")
    for message in chat.messages:
        spelled = tokenizer.special_tokens_in(text_of(message))
        notes += [f"{token} spelled in {message['role']} text" for token in spelled]
    if any(is_empty_answer(message) and not message["train"] for message in chat.messages):
        notes.append("empty answer, not learned")
    return list(dict.fromkeys(notes))


def _lost(message: Message, text: str) -> Iterator[str]:
    """Yield the names of the parts of an assistant message that are missing from its rendering."""
    thought, end, answer = text_of(message).rpartition("</think>")
    before, opened, inside = thought.partition("<think>")
    if not opened:  # the template has opened the thought
        before, inside = "", before
    parts = [("a part of an answer", before), ("a part of an answer", answer)]
    if message["train"]:  # in mere context, generation has no reasoning either
        parts += [("reasoning", message.get(name) or "") for name in REASONING]
        parts.append(("reasoning", inside if end else ""))
    others = {"role", "content", "train", "tool_calls", *REASONING}
    rest = [(f"{name} of an answer", value) for name, value in message.items() if name not in others]
    parts += [(name, value) for name, value in rest if isinstance(value, str) and is_long(value)]
    for name, part in parts:
        if isinstance(part, str) and not all(_is_in(line, text) for line in part.splitlines()):
            yield name


def _is_in(content: str, text: str) -> bool:
    """Whether `text` contains the content or its longest line, possibly JSON-escaped.

    Templates trim text, and quote the results of tools.
    """
    if content.strip() in text:
        return True
    line = max(map(str.strip, content.splitlines()), key=len, default="")
    return line in text or json.dumps(line, ensure_ascii=False)[1:-1] in text
