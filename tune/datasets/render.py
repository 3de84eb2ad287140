"""Step 3: `render(conversation, tokenizer, ...)` returns tokens and labels.

`as_text` renders a content as text with its supervised spans, and `labelled` turns the text into tokens with labels.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from tune.collators import IGNORE, Picture, Sample
from tune.datasets.parse.content import Chat, Content, Dropped, Plain, Tokens
from tune.datasets.parse.formats import Kind
from tune.datasets.parse.messages import ROLES, checked_messages, is_empty_answer
from tune.datasets.parse.pictures import pictures_of
from tune.errors import TuneError
from tune.tokenizers import (
    Beginnings,
    Encoded,
    Message,
    PictureFile,
    Span,
    Tokenizer,
    around_content,
    require_ours,
    require_unicode,
)
from tune.types import checked

TrainOn = Literal["assistant", "all", "last"] | list[Literal["system", "developer", "user", "assistant", "tool"]]
Turns = Literal["together", "as_seen"]


class Learned(NamedTuple):
    """A supervised span of a text: characters [start, end), and how much they count."""

    start: int
    end: int
    weight: float = 1.0


class Shown(NamedTuple):
    """A picture, a digest of its file, and its placeholder in a text: characters [start, end)."""

    start: int
    end: int
    file: PictureFile
    digest: int


class Conversation:
    """The beginnings of a flagged conversation, from which several texts are made."""

    def __init__(self, chat: Chat, tokenizer: Tokenizer) -> None:
        self.chat, self.tokenizer = chat, tokenizer

    @cached_property
    def beginnings(self) -> Beginnings:
        return self.tokenizer.beginnings(self.chat.messages, self.chat.tools)

    @cached_property
    def beginnings_with_json(self) -> Beginnings:
        """The same, with the arguments of tool calls as JSON strings."""
        return self.tokenizer.beginnings(list(map(_with_arguments_as_json, self.chat.messages)), self.chat.tools)


class Text(NamedTuple):
    """A flagged content, its text, the supervised spans of the text, the conversation that it is a beginning of, and
    its pictures."""

    content: Content
    text: str
    learned: list[Learned]
    source: Conversation | None = None
    pictures: Sequence[Shown] = ()


def learned_roles(train_on: TrainOn) -> Iterable[str]:
    """The roles whose messages are supervised. A plain text has the role assistant, and its prompt the role user."""
    if isinstance(train_on, list):
        return train_on
    return ROLES if train_on == "all" else ("assistant",)


@checked
def tokenize_conversation(
    tokenizer: Tokenizer,
    messages: list[Message],
    *,
    tools: list | None = None,
    train_on: TrainOn = "assistant",
    train_on_end_of_turn: bool = True,
) -> Sample:
    """Tokenize a conversation of any length: `labels[i]` is `tokens[i + 1]` where that token is supervised, else -100.

    `messages` have the form of a dataset's rows, `tools` are JSON schemas. See `tune.datasets.load` for `train_on`.

    Raises:
        TuneError: a message is invalid, the tokenizer has no chat template, or the template rejects the messages.
    """
    require_ours(tokenizer)
    tokenizer.require_chat_template()
    chat = Chat(checked_messages([*messages], "messages"), tools)
    train_on = train_on if isinstance(train_on, str) else [*train_on]
    return render(chat, tokenizer, train_on, train_on_end_of_turn)


def render(content: Content, tokenizer: Tokenizer, train_on: TrainOn, train_on_end_of_turn: bool) -> Sample:
    """The tokens and labels of one content of any length."""
    rendered = as_text(flagged(content, train_on), tokenizer, train_on)
    (encoding,) = tokenizer.encode_with_offsets([rendered.text])
    return labelled(rendered, Encoded(encoding), tokenizer, train_on_end_of_turn)


def render_shorter(
    chat: Chat, whole: Text, encoded: Encoded, tokenizer: Tokenizer, train_on: TrainOn, train_on_end_of_turn: bool
) -> Sample:
    """The tokens and labels of some messages of a conversation, whose whole text is given with its tokens. If they are
    its first, neither their text nor their tokens are made again, as far as they are known to begin the whole's."""
    assert isinstance(whole.content, Chat)
    first = whole.content.messages[: len(chat.messages)]
    is_beginning = all(message is other for message, other in zip(chat.messages, first, strict=True))
    source = whole.source if is_beginning else None
    rendered = as_text(flagged(chat, train_on), tokenizer, train_on, source)
    of_chat = tokenizer.encode_like(rendered.text, whole.text, encoded)
    return labelled(rendered, of_chat, tokenizer, train_on_end_of_turn)


def flagged(content: Content, train_on: TrainOn) -> Content:
    """A conversation with `train` in every message: the message's own value, else the one that follows from `train_on`,
    times the message's `weight`.

    An empty answer is only supervised if the message itself or `train_on=all` asks for it: the model would learn to
    answer nothing.
    """
    if not isinstance(content, Chat):
        return content
    roles = learned_roles(train_on)
    said = [index for index, message in enumerate(content.messages) if message["role"] == "assistant"]
    messages = []
    for index, message in enumerate(content.messages):
        learned = message["role"] in roles and (train_on != "last" or index == said[-1])
        train = message.get("train", learned and (train_on == "all" or not is_empty_answer(message)))
        is_prompt = index < content.prompt and train_on != "all"
        weight = message.get("weight", 1)
        message = {key: value for key, value in message.items() if key != "weight"}
        messages.append({**message, "train": bool(train) and not is_prompt and (train if weight == 1 else weight)})
    return replace(content, messages=messages)


def require_learned(content: Content) -> None:
    """Raise Dropped if no message of a flagged conversation is supervised."""
    if not isinstance(content, Chat) or any(message["train"] for message in content.messages):
        return
    answers = [message for message in content.messages[content.prompt :] if message["role"] == "assistant"]
    if not answers:
        raise Dropped("no assistant message")
    raise Dropped("empty answer" if all(map(is_empty_answer, answers)) else "no message to learn")


def require_whole_answers(content: Content, kind: Kind) -> None:
    """Raise TuneError if a message or token has a fractional weight although whole answers are compared."""
    parts = [each["train"] for each in content.messages] if isinstance(content, Chat) else []
    weights = content.weights if isinstance(content, Tokens) else parts
    if kind != "supervised" and (weight := next((each for each in weights or () if 0 < each < 1), None)):
        raise TuneError(
            f"a message has weight (or train) {weight}, but {kind} rows compare whole answers. Remove it, or set 0 or 1"
        )


def turns_of(content: Content) -> list[Content]:
    """A conversation for each supervised answer, which ends with it and supervises it alone.

    The template then renders the context as it does when the model is asked for this answer. Other contents are
    one turn. Raises TuneError if a message of another role than assistant is supervised.
    """
    if not isinstance(content, Chat):
        return [content]
    masked = [{**message, "train": False} for message in content.messages]
    learned = [index for index, message in enumerate(content.messages) if message["train"]]
    for index in learned:
        if (role := content.messages[index]["role"]) != "assistant":
            raise TuneError(
                f"message {index + 1} ({role}) has train: true, but with turns=as_seen only answers of the assistant "
                "are trained on. Remove train from the message, or set dataset.turns=together"
            )
    return [replace(content, messages=[*masked[:index], content.messages[index]]) for index in learned]


def as_text(content: Content, tokenizer: Tokenizer, train_on: TrainOn, source: Conversation | None = None) -> Text:
    """The text of a flagged content and its supervised spans. Raises TuneError for text that is not valid Unicode.

    `source`: a conversation that begins with the messages of `content`.
    """
    if isinstance(content, Chat):
        source = source or Conversation(content, tokenizer)
        text, learned = learned_text(content, source, whole=train_on == "all")
    elif isinstance(content, Plain):
        text, border = content.prompt + content.text, len(content.prompt)
        roles = learned_roles(train_on)
        parts = {"user": (0, border), "assistant": (border, len(text))}
        learned = [Learned(*span) for role, span in parts.items() if role in roles]
    else:
        text, learned = "", []
    require_unicode(text)
    files = pictures_of(content.messages) if isinstance(content, Chat) else []
    if not files:
        return Text(content, text, learned, source)
    text, learned, pictures = _with_placeholders(text, learned, files, tokenizer)
    return Text(content, text, learned, source, pictures)


def _with_placeholders(
    text: str, learned: list[Learned], files: Sequence[PictureFile], tokenizer: Tokenizer
) -> tuple[str, list[Learned], list[Shown]]:
    """The text with each picture's placeholder instead of the mark that the template wrote, and the spans in it."""
    processor = tokenizer.pictures
    if processor is None:
        raise TuneError("the row has pictures, and the model reads only text")
    pieces = text.split(processor.marker)
    if len(pieces) != len(files) + 1:
        raise TuneError(
            f"the chat template writes {len(pieces) - 1} pictures, and the row has {len(files)}: a text spells out "
            f"{processor.marker}, or the template leaves pictures out"
        )
    whole, pictures, borders, growths, at = pieces[0], [], [], [0], len(pieces[0])
    for file, piece in zip(files, pieces[1:], strict=True):
        placeholder, digest = processor.placeholder(file)
        pictures.append(Shown(len(whole), len(whole) + len(placeholder), file, digest))
        whole += placeholder + piece
        at += len(processor.marker)
        borders.append(at)
        growths.append(len(whole) - len(piece) - at)
        at += len(piece)

    def moved(place: int) -> int:
        return place + growths[bisect_right(borders, place)]

    return whole, [Learned(moved(start), moved(end), weight) for start, end, weight in learned], pictures


def labelled(rendered: Text, encoded: Encoded, tokenizer: Tokenizer, train_on_end_of_turn: bool) -> Sample:
    """The tokens of a text with labels for its supervised spans. A plain text gets BOS and EOS."""
    content, text, learned, *_ = rendered
    if isinstance(content, Tokens):
        tokens, targets = (np.array(ids, dtype=np.int32) for ids in (content.ids, content.labels))
        weights = None if content.weights is None else np.array([*content.weights[1:], 1], dtype=np.float32)
        return _weighed(Sample(tokens, np.append(targets[1:], np.int32(IGNORE)), weights=weights))
    tokens, prefix, places = encoded.ids, [], range(len(encoded))
    span = encoded.token_to_chars
    is_plain = isinstance(content, Plain)
    if is_plain:
        ids = tokens.tolist()
        prefix = [] if ids[: len(tokenizer.prefix_ids)] == tokenizer.prefix_ids else tokenizer.prefix_ids
        tokens = np.array(prefix + _with_eos(ids, tokenizer), dtype=np.int32)
    labels = np.full(len(tokens), IGNORE, dtype=np.int32)
    weights = None if all(each.weight == 1 for each in learned) else np.ones(len(tokens), dtype=np.float32)
    for start, end, weight in learned:
        first = max(1, bisect_right(places, start, key=lambda place: span(place)[1]) + len(prefix))
        last = bisect_left(places, end, key=lambda place: span(place)[0]) + len(prefix)
        if is_plain and end == len(text):
            last = len(tokens)  # EOS
        if not train_on_end_of_turn:
            last = _before_end_of_turn(tokens, first, last, tokenizer)
        if first < last:
            labels[first - 1 : last - 1] = tokens[first:last]
            if weights is not None:
                weights[first - 1 : last - 1] = weight
    pictures = []
    for start, end, file, digest in rendered.pictures:
        first = bisect_right(places, start, key=lambda place: span(place)[1])
        last = bisect_left(places, end, key=lambda place: span(place)[0])
        labels[max(0, first - 1) : last - 1] = IGNORE  # the model reads placeholders, and never writes them
        pictures.append(Picture(file, digest, first, last - first))
    return _weighed(Sample(tokens, labels, weights=weights, pictures=tuple(pictures)))


def _weighed(sample: Sample) -> Sample:
    """The sample without weights if all supervised tokens have weight 1. Tokens of weight 0 are not supervised."""
    if sample.weights is None:
        return sample
    labels = np.where(sample.weights > 0, sample.labels, np.int32(IGNORE))
    weights = np.where(labels != IGNORE, sample.weights, np.float32(1))
    return replace(sample, labels=labels, weights=weights if (weights != 1).any() else None)


def _with_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    if ids[-1:] == [tokenizer.eos_id]:
        return ids
    if tokenizer.eos_id is None:
        raise TuneError(
            f"the tokenizer in {tokenizer.path} has no eos_token, which teaches a model where a text ends. "
            "Set eos_token in tokenizer_config.json"
        )
    return [*ids, tokenizer.eos_id]


def shares_a_token(content: Content, encoded: Encoded) -> bool:
    """Whether a plain prompt ends inside the first token of the answer.

    In training, other tokens then precede the answer than in generation, where the prompt is tokenized alone.
    """
    if not isinstance(content, Plain) or not content.prompt or not content.text:
        return False
    border = len(content.prompt)
    token = encoded.char_to_token(border)
    span = None if token is None else encoded.token_to_chars(token)
    return span is not None and span[0] < border


def _before_end_of_turn(tokens: np.ndarray, first: int, last: int, tokenizer: Tokenizer) -> int:
    """The end of tokens [first, last) without trailing end-of-turn tokens and the blanks between and after them."""
    end = last
    for at in range(last - 1, first - 1, -1):
        if int(tokens[at]) in tokenizer.stop_ids:
            end = at
        elif tokenizer.decode([int(tokens[at])]).strip():
            break
    return end


def learned_text(chat: Chat, source: Conversation, whole: bool = False) -> tuple[str, list[Learned]]:
    """A flagged conversation as the template renders it, with the spans of supervised messages and their ends of turn.

    `source` is a conversation that begins with the same messages. `whole` also supervises the template's own text
    around the messages. Raises TuneError if a message cannot be located in the rendered text, or if the template leaves
    out a tool call.
    """
    if not whole:
        return _rendered(chat, source)
    if weight := next((each["train"] for each in chat.messages if 0 < each["train"] < 1), None):
        raise TuneError(
            f"a message has weight (or train) {weight}, but with train_on=all every token counts alike. Remove it, or "
            "set train_on=[system, user, assistant]"
        )
    others = [{**message, "train": not message["train"]} for message in chat.messages]
    text, masked = _rendered(replace(chat, messages=others), source)
    borders = [0, *(border for start, end, _ in masked for border in (start, end)), len(text)]
    return text, [Learned(start, end) for start, end in [*pairwise(borders)][::2] if start < end]


def _rendered(chat: Chat, source: Conversation) -> tuple[str, list[Learned]]:
    calls = [call["function"]["name"] for message in chat.messages for call in message.get("tool_calls", ())]
    try:
        text, parts = _learned(chat.messages, source.beginnings, source.tokenizer)
    except TuneError as refusal:
        if not calls:
            raise
        # Nearly all templates expect a call's arguments as an object; a few (DeepSeek V3) expect a JSON string.
        try:
            messages = list(map(_with_arguments_as_json, chat.messages))
            text, parts = _learned(messages, source.beginnings_with_json, source.tokenizer)
        except TuneError:
            raise refusal from None
    if lost := [name for name in calls if name not in text]:
        raise TuneError(f"the chat template leaves out the call of the tool {lost[0]}: it does not support tool calls")
    return text, parts


def _learned(messages: list[Message], beginnings: Beginnings, tokenizer: Tokenizer) -> tuple[str, list[Learned]]:
    roles = {message["role"] for message in messages if message["train"]}
    answers: list[Learned] = []
    if "assistant" in roles:
        text, spans = tokenizer.supervised_spans(messages, beginnings=beginnings)
        weights = [float(each["train"]) for each in messages if each["role"] == "assistant" and each["train"]]
        if {*weights} == {1.0}:
            weights = [1.0] * len(spans)
        elif len(spans) != len(weights):
            raise TuneError(
                f"weights need one generation block per assistant message, but the chat template has {len(spans)} for "
                f"{len(weights)} messages: remove `weight`"
            )
        answers = [Learned(*span, weight) for span, weight in zip(spans, weights, strict=True)]
        if len(roles) == 1:
            return text, answers
    bare = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    text = beginnings.render(len(messages))
    others = [
        Learned(*_span_of(index, bare, beginnings, text, tokenizer), float(message["train"]))
        for index, message in enumerate(messages)
        if message["train"] and message["role"] != "assistant"
    ]
    return text, sorted([*answers, *others])


def _span_of(index: int, messages: list[Message], beginnings: Beginnings, text: str, tokenizer: Tokenizer) -> Span:
    """The span of a message whose role is not assistant, including the end of turn after it."""
    around = around_content(beginnings.render_changed, messages, index)
    if not around or not (text.startswith(around[0]) and text.endswith(around[1])):
        raise TuneError(
            f"message {index + 1} ({messages[index]['role']}) cannot be located in the text of the chat template: "
            "remove its role from train_on"
        )
    before, behind = around
    end = len(text) - len(behind)
    stops = map(tokenizer.decode, ([token] for token in tokenizer.stop_ids))
    return len(before), end + max((len(stop) for stop in stops if behind.startswith(stop)), default=0)


def _with_arguments_as_json(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
