"""Parse a row: recognize its format by its columns, read it, and find columns that the format would leave out."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from json import dumps
from typing import Any

from tune.datasets.parse.content import Chat, Content, Dropped, Plain, Row, Tokens
from tune.datasets.parse.formats import Format
from tune.datasets.parse.pictures import text_of
from tune.errors import TuneError
from tune.lookup import did_you_mean

# Other names of a format's columns in common datasets, in the order in which they are tried.
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

WEIGHTS = ("weight", "loss_weight", "loss_scale", "loss_mask")
# Variables and templates of a row, which TRL, transformers and LLaMA-Factory read.
TEMPLATE = ("chat_template_kwargs", "chat_template", "enable_thinking")
# The documents of a row that another program has packed.
PACKED = (
    *("position_ids", "seq_lengths", "sequence_lengths", "cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seqlens_q"),
    *("seq_idx", "document_ids", "doc_ids"),
)
# Columns that change the meaning of a row: without them, the rest would teach something else.
MEANINGS = {
    **dict.fromkeys(("chosen", "rejected"), "which of two answers is better, for preference tuning"),
    "label": "whether the answer is good, or the class of the text, for training on labels",
    **dict.fromkeys(WEIGHTS, "how much the row or its tokens count"),
    "kto_tag": "whether the answer is good, for training on labels",
    **dict.fromkeys(("rejected_response", "rejected_messages"), "a worse answer, for preference tuning"),
    **dict.fromkeys(TEMPLATE, "how the chat template renders the row; the tokenizer's template renders all rows alike"),
    **dict.fromkeys(PACKED, "where the documents of a packed row begin; give each document a row, and set packed=true"),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "images, video or audio"),
}
# Columns with these names are content, even if their text is short.
CONTENT = (
    *("system", "system_prompt", "tools", "input", "context", "history"),
    *("reasoning", "reasoning_content", "thinking"),
)
IMAGE = "<image>"  # placeholder of an image in a prompt
NOTHING: tuple = (None, "", [], {})


class OtherMeaning(TuneError):
    """A format would leave out a column or mark that changes the meaning of a row."""


def recognize(row: Row, columns: Mapping[str, str], place: str, formats: tuple[Format, ...]) -> Format:
    """The first of `formats` whose columns are all in the row.

    `columns` maps a format's columns to the data's names; only formats that have all of its keys are considered.
    """
    known = list(dict.fromkeys(column for format in formats for column in (*format.columns, *format.optional)))
    require_columns(row, columns, known, place)
    fitting = [format for format in formats if columns.keys() <= {*format.columns, *format.optional}]
    if not fitting:
        raise TuneError(f"columns: no format has {' and '.join(columns)} together. Known formats: {_listed(formats)}")
    # Columnar files have every column in each row, null where it does not apply.
    filled = {column for column, value in row.items() if value is not None}
    for names in (filled, row):
        for format in fitting:
            if all(columns.get(column, column) in names for column in format.columns):
                return format
    if len(fitting) == 1:
        wanted = " and ".join(columns.get(column, column) for column in fitting[0].columns)
        problem = f"format={fitting[0].name} needs the columns {wanted}; the row has {', '.join(row)}"
    else:
        problem = f"the columns {', '.join(row) or '(none)'} match no known format: {_listed(fitting)}"
    raise TuneError(f"{place}: {problem}. {_advice(row, columns, fitting)}")


def parse(row: Row, format: Format, columns: Mapping[str, str], ignore: Sequence[str] = ()) -> list[Content]:
    """Parse a row of this format: one content, or one for each of several answers to a prompt.

    `columns` maps the format's columns to the data's names; `ignore` lists columns that may be left out.

    Raises:
        Dropped: the row cannot be trained on.
        OtherMeaning: the row has columns, or marks in a text, that change its meaning.
        TuneError: the row is invalid.
    """
    row = renamed(row, format, columns)
    contents = format.parse(row)
    for content in contents:
        require_meaning(row, format.columns, content, ignore)
    unread = unread_texts(row, format, ignore)
    return [replace(content, unread=unread) for content in contents] if unread else contents


def require_columns(row: Row, columns: Mapping[str, str], known: Sequence[str], place: str) -> None:
    """Raise TuneError if a key of `columns` is not `known`, or if the row does not have its value as a column."""
    for ours, theirs in columns.items():
        if not theirs and ours.partition(":")[0] in known:
            name, _, theirs = ours.partition(":")
            raise TuneError(f"columns.{ours}: YAML needs a blank after the colon: '{{{name}: {theirs}}}'")
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
    """The row with the format's names for its columns."""
    if columns:  # a renamed column is not read under its own name as well
        rest = {name: value for name, value in row.items() if name not in columns.values()}
        row = {**rest, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}
    missing = [columns.get(column, column) for column in format.columns if column not in row]
    if missing:
        raise TuneError(
            f"no column {' and '.join(missing)}, unlike earlier rows; this row has {', '.join(row) or 'no columns'}. "
            "The rows of a file have one format: split the file, or convert its rows with a function of yours in "
            "dataset.format"
        )
    return row


def require_meaning(row: Row, columns: Sequence[str], content: Content, ignore: Sequence[str]) -> None:
    """Raise OtherMeaning if a column other than `columns`, or a mark in a prompt, changes the meaning of the row.

    `ignore` lists columns and marks that may be left out.
    """
    if not (left_out := [name for name in _other_meanings(row, content, columns) if name not in ignore]):
        return
    what = dict.fromkeys(
        MEANINGS.get(name, "the place of an image, which a text model does not see") for name in left_out
    )
    raise OtherMeaning(
        f"the row has {' and '.join(left_out)} in addition to {' and '.join(columns)}: {'; '.join(what)}. This would "
        f"not be read. If that is intended, set '{_ignored(left_out)}'. To leave out only rows that have it, set "
        "dataset.filter=my_data.is_wanted"
    )


def unread_texts(row: Row, format: Format, ignore: Sequence[str]) -> dict[str, list[str]]:
    """The texts of columns that the format does not read, by column.

    A text that contains everything that is read does not count, such as Alpaca's `text`. `ignore` lists columns to
    leave out.
    """
    read = (*format.columns, *format.optional)
    others = {name: [*_texts(value)] for name, value in row.items() if name not in read and name not in ignore}
    others = {name: texts for name, texts in others.items() if texts and (name in CONTENT or any(map(is_long, texts)))}
    if not others:
        return {}
    known = [text for name in read for text in _texts(row.get(name))]
    if sum(map(len, known)) < 20:  # so short that other texts contain them by chance
        return others
    return {name: [text for text in texts if not all(part in text for part in known)] for name, texts in others.items()}


def is_long(text: str) -> bool:
    """Whether a text has at least eight words, or twenty characters of a script without spaces."""
    return text.count(" ") >= 7 or len(text[:200].encode(errors="ignore")) - len(text[:200]) >= 40


def _texts(value: Any) -> Iterator[str]:
    """Yield the nonempty strings in a value, without roles and types."""
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
    names = [name for name in names if name not in WEIGHTS or _is_weight(row[name])]
    names = [name for name in names if name not in PACKED or _is_packed(name, row, content)]
    if isinstance(content, Plain):
        prompts = [content.prompt]
    else:
        messages = content.messages if isinstance(content, Chat) else []
        prompts = [text_of(message) for message in messages if message["role"] != "assistant"]
    return [*names, IMAGE] if any(IMAGE in prompt for prompt in prompts) else names


def _is_packed(name: str, row: Row, content: Content) -> bool:
    """Whether a column says that a row of tokens holds anything but one document from its beginning."""
    if not isinstance(content, Tokens):
        return False
    values, length = row[name], len(row["input_ids"])
    if not isinstance(values, list):
        return False
    if not all(isinstance(value, int) for value in values):
        return True
    if name == "position_ids" and len(values) == length:  # padding has any positions
        mask = row.get("attention_mask") or [1] * length
        kept = [position for position, is_kept in zip(values, mask, strict=True) if is_kept]
        return kept != list(range(len(kept)))
    if name.startswith("cu_"):
        return values not in ([0, length], [0, len(content.ids)])
    if name.endswith("lengths"):
        return values not in ([length], [len(content.ids)])
    return len({*values}) > 1


def _is_weight(value: Any) -> bool:
    """Whether a column's value is a weight that changes something: a number other than 1, or a list of numbers. CSV
    holds numbers as texts, and Parquet may hold NaN for nothing."""
    try:
        numbers = [float(each) for each in (value if isinstance(value, list) else [value])]
    except (TypeError, ValueError):
        return False
    return any(number != 1 and not math.isnan(number) for number in numbers)


def _advice(row: Row, columns: Mapping[str, str], formats: Sequence[Format]) -> str:
    """Advice for a row that matches no format: the settings with which it can be read."""
    if "label" in row and all("chosen" in format.columns for format in formats):
        settings = "loss._component_=tune.losses.KTO dataset.kind=labelled"
        return f"preference_finetune trains on answers with a label: {settings}"
    chats_first = sorted(formats, key=lambda format: not format.is_chat)
    if ways := [way for format in chats_first if (way := _renaming(row, columns, format))]:
        advice = f"Set {', or '.join(ways)}"
        if {"chosen", "rejected"} <= row.keys():
            advice = f"preference_finetune and reward_finetune train on pairs. {advice}"
        return advice
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            if "role" in value[0] and all("chosen" in format.columns for format in formats):
                return f"{name} is a conversation, not a pair of answers: use full_finetune or lora_finetune"
            return f"{name} is a list of objects: if these are the rows, save this list alone as a .json file"
    return (
        f"Name the columns to read, such as {_example(row, columns, formats)}. Otherwise give your own function that "
        "converts a row to one of these formats: dataset.format=my_data.to_messages (in my_data.py, in the current "
        "folder)"
    )


def _example(row: Row, columns: Mapping[str, str], formats: Iterable[Format]) -> str:
    """A setting that reads columns of this row: a question and an answer, or else a text. COLUMN stands for one of
    several that it may be."""
    texts = [name for name, value in row.items() if isinstance(value, str) and name not in columns.values()]
    known = [[column for column in format.columns if column not in columns] for format in formats]
    likely = [wanted for wanted in (["instruction", "output"], ["text"], *known) if wanted in known]
    wanted = next((each for each in likely if len(each) <= len(texts)), likely[0])
    names = texts if len(texts) == len(wanted) else ["COLUMN"] * len(wanted)
    pairs = {**columns, **dict(zip(wanted, names, strict=True))}
    return f"'dataset.columns={{{', '.join(f'{ours}: {_yaml(theirs)}' for ours, theirs in pairs.items())}}}'"


def _renaming(row: Row, columns: Mapping[str, str], format: Format) -> str | None:
    """The settings with which a row can be read in a format, if its columns have common names."""
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
            return None  # an answer; the question is in another column
        left = _other_meanings(read, content, format.columns)
    except Dropped:  # readable, although this row is dropped
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
