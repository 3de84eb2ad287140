"""A row as what it says: which format it has by its columns, what that reads of it, and what it would leave out."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from json import dumps
from typing import Any

from tune.datasets.parse.content import Chat, Content, Dropped, Plain, Row
from tune.datasets.parse.formats import Format
from tune.errors import TuneError
from tune.lookup import did_you_mean

# The names that a format's columns have elsewhere, in the order in which they are tried.
QUESTIONS = ("question", "prompt", "instruction", "query", "problem", "user", "human", "inputs", "input")
ANSWERS = ("answer", "response", "completion", "output", "solution", "reply", "assistant", "target", "chosen")
OTHER_NAMES = {
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns", "chosen"),
    "prompt": QUESTIONS,
    "completion": ANSWERS,
    "instruction": QUESTIONS,
    "output": ANSWERS,
    "input": ("context",),
    "system": ("system_prompt", "system_message"),
    "text": ("content", "document", "body", "article", "story", "passage", "markdown"),
}

# Columns that change what the rest of a row says: learned without them, it would teach something else.
MEANINGS = {
    **dict.fromkeys(("chosen", "rejected"), "which of two answers is the better one, for preference tuning"),
    "label": "whether the answer is a good one or what class the text is of, for training on labels",
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "what is seen or heard beside the text"),
}
# Columns of these names belong to what is read or said, however short their text is.
CONTENT = (
    *("system", "system_prompt", "tools", "input", "context", "history"),
    *("reasoning", "reasoning_content", "thinking"),
)
IMAGE = "<image>"  # stands in prompts where an image was
NOTHING: tuple = (None, "", [], {})


class OtherMeaning(TuneError):
    """A row says something else than a format reads of it."""


def recognise(row: Row, columns: Mapping[str, str], place: str, formats: tuple[Format, ...]) -> Format:
    """The first of the `formats` that has its columns in the row. `columns` gives the data's name for a format's, and
    leaves those that have all of these."""
    known = list(dict.fromkeys(column for format in formats for column in (*format.columns, *format.optional)))
    require_columns(row, columns, known, place)
    fitting = [format for format in formats if columns.keys() <= {*format.columns, *format.optional}]
    if not fitting:
        raise TuneError(f"columns: no format has {' and '.join(columns)} together; known are {_listed(formats)}")
    # Columnar files have each column in every row, and null where it is of no use.
    filled = {column for column, value in row.items() if value is not None}
    for names in (filled, row):
        for format in fitting:
            if all(columns.get(column, column) in names for column in format.columns):
                return format
    if len(fitting) == 1:
        wanted = " and ".join(columns.get(column, column) for column in fitting[0].columns)
        problem = f"format={fitting[0].name} needs the columns {wanted}; the row has {', '.join(row)}"
    else:
        problem = f"the columns {', '.join(row) or '(none)'} are none of the known formats: {_listed(fitting)}"
    raise TuneError(f"{place}: {problem}. {_advice(row, columns, fitting)}")


def parse(row: Row, format: Format, columns: Mapping[str, str], ignore: Sequence[str] = ()) -> list[Content]:
    """What a row of this format says: one content, or one for each of several answers to a prompt.

    `columns` gives the data's names for the format's; `ignore` names columns that may be left out.

    Raises:
        Dropped: the row is of no use.
        OtherMeaning: it has columns, or marks in a text, without which it says something else.
        TuneError: it is a mistake.
    """
    row = renamed(row, format, columns)
    contents = format.parse(row)
    for content in contents:
        require_meaning(row, format.columns, content, ignore)
    unread = unread_texts(row, format, ignore)
    return [replace(content, unread=unread) for content in contents] if unread else contents


def require_columns(row: Row, columns: Mapping[str, str], known: Sequence[str], place: str) -> None:
    """Raises TuneError if `columns` names one that is not `known`, or by a name that the row has not."""
    for ours, theirs in columns.items():
        if ours not in known:
            raise TuneError(
                f"columns.{ours}: no format has such a column.{did_you_mean(ours, known)} "
                f"The formats' columns are {', '.join(known)}"
            )
        if theirs not in row:
            raise TuneError(
                f"columns.{ours}={theirs}: {place} has no such column.{did_you_mean(theirs, row)} "
                f"It has {', '.join(row)}"
            )


def renamed(row: Row, format: Format, columns: Mapping[str, str]) -> Row:
    """The row with the columns as the format calls them."""
    if columns:  # what is another column of the format is not read by its own name too
        rest = {name: value for name, value in row.items() if name not in columns.values()}
        row = {**rest, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}
    missing = [columns.get(column, column) for column in format.columns if column not in row]
    if missing:
        raise TuneError(f"no column {' and '.join(missing)} as in the rows before; it has {', '.join(row) or 'none'}")
    return row


def require_meaning(row: Row, columns: Sequence[str], content: Content, ignore: Sequence[str]) -> None:
    """Raises OtherMeaning if beside the `columns` that are read there is one, or in a prompt a mark, that changes what
    the row says. `ignore` names those that may be left out."""
    if not (left_out := [name for name in _other_meanings(row, content, columns) if name not in ignore]):
        return
    what = dict.fromkeys(
        MEANINGS.get(name, "where an image is, which a model of text does not see") for name in left_out
    )
    raise OtherMeaning(
        f"the row has {' and '.join(left_out)} beside {' and '.join(columns)}: {'; '.join(what)}. It would be left "
        f"out: if that is meant, set '{_ignored(left_out)}'. If only some rows are so, leave these rows out: "
        "dataset.filter=my_data.is_wanted"
    )


def unread_texts(row: Row, format: Format, ignore: Sequence[str]) -> dict[str, list[str]]:
    """The texts of each column that the format does not read although it holds text of its own, by the column's name.
    Texts that have in them all that is read (as Alpaca's `text` has) do not count; `ignore` names columns to leave
    out."""
    read = (*format.columns, *format.optional)
    others = {name: [*_texts(value)] for name, value in row.items() if name not in read and name not in ignore}
    others = {name: texts for name, texts in others.items() if texts and (name in CONTENT or any(map(is_long, texts)))}
    if not others:
        return {}
    known = [text for name in read for text in _texts(row.get(name))]
    if sum(map(len, known)) < 20:  # shorter ones are in many a text
        return others
    return {name: [text for text in texts if not all(part in text for part in known)] for name, texts in others.items()}


def is_long(text: str) -> bool:
    """Eight words, or twenty characters of a script without spaces."""
    return text.count(" ") >= 7 or len(text[:200].encode(errors="ignore")) - len(text[:200]) >= 40


def _texts(value: Any) -> Iterator[str]:
    """The strings in a value that say something."""
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item) if name not in ("role", "from", "type") else ()


def _other_meanings(row: Row, content: Content, columns: Sequence[str]) -> list[str]:
    names = [name for name in MEANINGS if row.get(name) not in NOTHING and name not in columns]
    if isinstance(content, Plain):
        prompts = [content.prompt]
    else:
        messages = content.messages if isinstance(content, Chat) else []
        prompts = [message.get("content") or "" for message in messages if message["role"] != "assistant"]
    return [*names, IMAGE] if any(IMAGE in prompt for prompt in prompts) else names


def _advice(row: Row, columns: Mapping[str, str], formats: Iterable[Format]) -> str:
    """What to do about a row that has none of the formats: of what is known to help, what can be read so."""
    if "label" in row and all("chosen" in format.columns for format in formats):
        settings = "loss._component_=tune.losses.KTO dataset.kind=labelled"
        return f"preference_finetune learns from answers with a label: {settings}"
    chats_first = sorted(formats, key=lambda format: not format.is_chat)
    if ways := [way for format in chats_first if (way := _renaming(row, columns, format))]:
        advice = f"Say which is which: {', or '.join(ways)}"
        if {"chosen", "rejected"} <= row.keys():
            advice = f"preference_finetune and reward_finetune learn from pairs. {advice}"
        return advice
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            if "role" in value[0] and all("chosen" in format.columns for format in formats):
                return f"{name} is a conversation, not a pair of answers: full_finetune and lora_finetune learn from it"
            return f"{name} is a list of objects: if these are the rows, save this list alone as a .json file"
    return (
        "If a column only has another name, say so: 'dataset.columns={text: its_name}'. Otherwise give a function of "
        "yours from a row to one with these columns: dataset.format=my_data.to_messages"
    )


def _renaming(row: Row, columns: Mapping[str, str], format: Format) -> str | None:
    """The settings with which a row can be read in a format, if its columns have names of usual kind."""
    names = {name.strip().lower(): name for name in row if name not in columns.values()}
    mapping = dict(columns)
    for column in (*format.columns, *format.optional):
        if column in mapping:
            continue
        theirs = next((names[name] for name in (column, *OTHER_NAMES.get(column, ())) if name in names), column)
        mapping |= {column: theirs} if theirs != column else {}
    is_chat = format.is_chat
    try:
        read = renamed(row, format, mapping)
        content, *_ = format.parse(read)
        is_chat = isinstance(content, Chat)
        if isinstance(content, Chat) and content.messages[0]["role"] == "assistant":
            return None  # an answer, whose question is in another column
        left = _other_meanings(read, content, format.columns)
    except Dropped:  # it is of no use, but can be read
        left = []
    except TuneError:
        return None
    pairs = ", ".join(f"{ours}: {_yaml(theirs)}" for ours, theirs in mapping.items())
    ignored = f" '{_ignored(left)}'" if left else ""
    return f"'dataset.columns={{{pairs}}}'{ignored} ({'a chat' if is_chat else 'plain text'})"


def _ignored(names: Iterable[str]) -> str:
    return f"dataset.ignore=[{', '.join(names)}]"


def _yaml(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else dumps(name, ensure_ascii=False)


def _listed(formats: Iterable[Format]) -> str:
    return "; ".join(" + ".join(format.columns) for format in formats)
