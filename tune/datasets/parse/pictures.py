"""Pictures of a row: parts of messages, marks in texts, and the columns `images` and `image`."""

import base64
import os
import re
from collections.abc import Iterator
from typing import Any

from tune.datasets.parse.content import Row, require
from tune.errors import TuneError, explained
from tune.tokenizers import Message, PictureFile

COLUMNS = ("images", "image")  # the pictures of a row, in order
KINDS = ("image", "image_url")  # types of parts
MARK = "<image>"  # in a text: the place of a picture
# Columns of messages. Each of the answers that are compared has the same question, and thus the same pictures.
MESSAGES = ("messages", "conversations", "prompt", "completion")
ANSWERS = ("chosen", "rejected")


def with_pictures(row: Row, folder: str) -> Row:
    """The row with its pictures in its messages: a part `{"type": "image"}` for each, and the files, in order, in the
    message's `pictures`.

    Pictures of the columns fill the parts without one and the marks in texts. If there are neither, they stand before
    the first question. Relative paths are those in `folder`. Raises TuneError if the numbers differ.
    """
    columns = [name for name in COLUMNS if row.get(name) not in (None, "", [])]
    if len(columns) > 1:
        raise TuneError(f"the row has {' and '.join(columns)}; remove one")
    given: list[PictureFile] = []
    for name in columns:
        values = row[name] if isinstance(row[name], list) else [row[name]]
        given = [_file(value, f"{name}[{index}]", folder) for index, value in enumerate(values)]
    chats = {name: row[name] for name in (*MESSAGES, *ANSWERS) if _is_chat(row.get(name))}
    if not chats:
        return row
    marked = {name: [_marked(message, bool(given), folder) for message in chat] for name, chat in chats.items()}
    shared = [name for name in MESSAGES if name in marked]
    compared = [name for name in ANSWERS if name in marked]
    has_any = any(message.get("pictures") for chat in marked.values() for message in chat)
    if given and not has_any:
        for name in shared[:1] or compared:
            marked[name] = _before_question(marked[name], len(given))
    for names in [[*shared, name] for name in compared] or [shared]:
        places = [place for name in names for place in _places(marked[name])]
        if len(places) != len(given):
            raise TuneError(
                f"the messages have {len(places)} places for pictures, and {' and '.join(columns) or 'images'} has "
                f"{len(given)}"
            )
        for (pictures, index), picture in zip(places, given, strict=True):
            pictures[index] = picture
    return {name: value for name, value in row.items() if name not in columns} | marked


def pictures_of(messages: list[Message]) -> list[PictureFile]:
    """The pictures of a conversation, in order."""
    return [picture for message in messages for picture in message.get("pictures", ())]


def text_of(message: Message) -> str:
    """The text of a message without its pictures."""
    return "".join(texts_of(message))


def texts_of(message: Message) -> list[str]:
    """The texts of a message between its pictures."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _places(messages: list[Message]) -> Iterator[tuple[list[Any], int]]:
    """Yield the places that have no picture yet: a list of pictures and an index in it."""
    for message in messages:
        pictures = message.get("pictures")
        if isinstance(pictures, list):
            yield from ((pictures, index) for index, picture in enumerate(pictures) if picture is None)


def _marked(message: Message, is_given: bool, folder: str) -> Message:
    """A message with a part for each picture, and its pictures; None for one that a column has."""
    if "pictures" in message:
        raise TuneError("pictures in a message is not read: give each picture a part of the message's content")
    key = "value" if "value" in message and "content" not in message else "content"
    content = message.get(key)
    is_answer = message.get("role", message.get("from")) in ("assistant", "gpt")
    if isinstance(content, str) and is_given and not is_answer and MARK in content:
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return message
    parts: list[dict[str, Any]] = []
    pictures: list[PictureFile | None] = []
    for index, part in enumerate(content):
        if part.get("type") in KINDS:
            parts.append({"type": "image"})
            pictures.append(_of_part(part, f"{key}[{index}]", folder))
            continue
        text = part.get("text")
        if not (part.get("type") == "text" and isinstance(text, str) and is_given and not is_answer):
            parts.append(part)
            continue
        for number, piece in enumerate(text.split(MARK)):
            if number:
                parts.append({"type": "image"})
                pictures.append(None)
            if piece:
                parts.append({"type": "text", "text": piece})
    return {**message, key: parts, "pictures": pictures} if pictures else message


def _before_question(messages: list[Message], count: int) -> list[Message]:
    """The messages with places for pictures before the first question."""
    at = next((at for at, each in enumerate(messages) if each.get("role", each.get("from")) in ("user", "human")), 0)
    message = messages[at]
    key = "value" if "value" in message and "content" not in message else "content"
    content = message.get(key)
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    parts = [*({"type": "image"} for _ in range(count)), *text]
    return [*messages[:at], {**message, key: parts, "pictures": [None] * count}, *messages[at + 1 :]]


def _of_part(part: dict[str, Any], place: str, folder: str) -> PictureFile | None:
    """The picture of a part of a message, or None if a column has it."""
    value = next((part[name] for name in (*KINDS, "url", "path", "bytes") if part.get(name)), None)
    return None if value is None else _file(value, place, folder)


def _file(value: Any, place: str, folder: str) -> PictureFile:
    """A picture: a path, bytes, a data URL, or an object with one of these under `bytes`, `url` or `path`."""
    if isinstance(value, dict):
        value = next((value[name] for name in ("bytes", "url", "path") if value.get(name)), None)
    if isinstance(value, bytes):
        return PictureFile(content=value)
    require(isinstance(value, str) and bool(value), place, value, "a picture: a path, bytes, or a data URL")
    if value.startswith("data:"):
        with explained(f"{place} is not a valid data URL", ValueError):
            return PictureFile(content=base64.b64decode(value.partition(",")[2], validate=True))
    if re.match(r"\w+://", value) and not value.startswith("file://"):
        raise TuneError(f"{place} is a URL, and pictures are not downloaded. Save it as a file")
    return PictureFile(os.path.join(folder, value.removeprefix("file://")))
