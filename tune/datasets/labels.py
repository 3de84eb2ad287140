"""What is learned of a row's content: text with the spans to learn, and that as tokens with labels."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, cast

import numpy as np
from tokenizers import Encoding

from tune.collators import IGNORE, Sample
from tune.datasets.formats.content import Chat, Content, Plain, Tokens
from tune.datasets.formats.messages import ROLES, checked_messages, is_empty_answer
from tune.errors import TuneError
from tune.tokenizers import Message, Span, Tokenizer, around_content, require_ours, require_unicode
from tune.types import checked

TrainOn = Literal["assistant", "all", "last"] | list[Literal["system", "developer", "user", "assistant", "tool"]]


@dataclass(frozen=True, slots=True)
class Draft:
    """A row's content as text, with the character spans to learn."""

    content: Content
    text: str = ""
    spans: Sequence[Span] = ()
    remarks: Sequence[str] = ()
    columns: Mapping[str, float] = field(default_factory=dict)


def learned_roles(train_on: TrainOn) -> Iterable[str]:
    """The roles whose messages are learned; a plain text is the assistant's, and its prompt is the user's."""
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
    """The tokens and labels of a conversation, of any length: `labels[i]` is `tokens[i + 1]` where that is learned, or
    -100. `messages` are as in the rows of a dataset, `tools` JSON schemas; `train_on` is that of `tune.datasets.load`.

    Raises:
        TuneError: a message is none, the tokenizer has no chat template, or its template does not take them.
    """
    require_ours(tokenizer)
    tokenizer.require_chat_template()
    chat = Chat(checked_messages([*messages], "messages"), tools)
    train_on = train_on if isinstance(train_on, str) else [*train_on]
    return sample_of(chat, tokenizer, train_on, train_on_end_of_turn)


def sample_of(content: Content, tokenizer: Tokenizer, train_on: TrainOn, train_on_end_of_turn: bool) -> Sample:
    """One content as one sample, however long."""
    content = flagged(content, train_on) if isinstance(content, Chat) else content
    draft = rendered(content, tokenizer, train_on)
    (encoding,) = tokenizer.encode_with_offsets([draft.text])
    return labelled(draft, encoding, tokenizer, train_on_end_of_turn)


def flagged(chat: Chat, train_on: TrainOn) -> Chat:
    """The conversation with `train` in every message: the message's own, or what `train_on` says. An answer without
    content is not learned unless the message, or `all`, says so: the model would learn to say nothing."""
    roles = learned_roles(train_on)
    said = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    messages = []
    for index, message in enumerate(chat.messages):
        learned = message["role"] in roles and (train_on != "last" or index == said[-1])
        train = message.get("train", learned and (train_on == "all" or not is_empty_answer(message)))
        train = train and (index >= chat.prompt or train_on == "all")
        messages.append({**message, "train": train})
    return replace(chat, messages=messages)


def rendered(content: Content, tokenizer: Tokenizer, train_on: TrainOn) -> Draft:
    """The text of a content whose messages are flagged. Raises TuneError for text that is none."""
    if isinstance(content, Chat):
        text, spans = learned_text(content, tokenizer, whole=train_on == "all")
    elif isinstance(content, Plain):
        text, border = content.prompt + content.text, len(content.prompt)
        roles = learned_roles(train_on)
        spans = [(0, border)] * ("user" in roles) + [(border, len(text))] * ("assistant" in roles)
    else:
        text, spans = "", []
    require_unicode(text)
    return Draft(content, text, spans)


def labelled(draft: Draft, encoding: Encoding, tokenizer: Tokenizer, train_on_end_of_turn: bool) -> Sample:
    """The tokens of a draft, whose text `encoding` is, with their labels; a plain text gets BOS and EOS."""
    if isinstance(draft.content, Tokens):
        tokens, targets = (np.array(ids, dtype=np.int32) for ids in (draft.content.ids, draft.content.labels))
        return Sample(tokens, np.append(targets[1:], np.int32(IGNORE)))
    ids, prefix, places = encoding.ids, [], range(len(encoding))
    # Few are asked for, and `offsets`, which are all of them, take as long as rendering the text.
    span = cast(Callable[[int], Span], encoding.token_to_chars)
    is_plain = isinstance(draft.content, Plain)
    if is_plain:
        prefix = tokenizer.prefix_ids
        prefix = prefix if ids[: len(prefix)] != prefix else []  # the text has it already
        if ids[-1:] != [tokenizer.eos_id]:
            if tokenizer.eos_id is None:
                raise TuneError(
                    f"the tokenizer in {tokenizer.path} names no eos_token, and a model learns from it where a text "
                    "ends: set eos_token in tokenizer_config.json"
                )
            ids = [*ids, tokenizer.eos_id]
    tokens = np.array(prefix + ids, dtype=np.int32)
    labels = np.full(len(tokens), IGNORE, dtype=np.int32)
    for start, end in draft.spans:
        first = max(1, bisect_right(places, start, key=lambda place: span(place)[1]) + len(prefix))
        last = bisect_left(places, end, key=lambda place: span(place)[0]) + len(prefix)
        if is_plain and end == len(draft.text):
            last = len(tokens)  # EOS
        if not train_on_end_of_turn:
            last = _before_end_of_turn(tokens, first, last, tokenizer)
        if first < last:
            labels[first - 1 : last - 1] = tokens[first:last]
    return Sample(tokens, labels)


def shares_a_token(draft: Draft, encoding: Encoding) -> bool:
    """Whether a plain prompt ends inside the token that the answer begins with. The model then learns the answer after
    other tokens than those of the prompt alone, which it is asked with."""
    if not isinstance(draft.content, Plain) or not draft.content.prompt or not draft.content.text:
        return False
    border = len(draft.content.prompt)
    token = encoding.char_to_token(border)
    span = None if token is None else encoding.token_to_chars(token)
    return span is not None and span[0] < border


def _before_end_of_turn(tokens: np.ndarray, first: int, last: int, tokenizer: Tokenizer) -> int:
    """Where the tokens [first, last) end without those that end a turn and the blanks behind and between them."""
    end = last
    for at in range(last - 1, first - 1, -1):
        if int(tokens[at]) in tokenizer.stop_ids:
            end = at
        elif tokenizer.decode([int(tokens[at])]).strip():
            break
    return end


def learned_text(chat: Chat, tokenizer: Tokenizer, whole: bool = False) -> tuple[str, list[Span]]:
    """A flagged conversation as the template renders it, and the spans of the learned messages with their ends of turn.

    `whole` learns what the template writes around them too. Raises TuneError where the template does not tell where a
    message is, or leaves out a tool call.
    """
    if not whole:
        return _rendered(chat, tokenizer)
    others = [{**message, "train": not message["train"]} for message in chat.messages]
    text, masked = _rendered(replace(chat, messages=others), tokenizer)
    borders = [0, *(border for span in masked for border in span), len(text)]
    return text, [(start, end) for start, end in [*pairwise(borders)][::2] if start < end]


def _rendered(chat: Chat, tokenizer: Tokenizer) -> tuple[str, list[Span]]:
    calls = [call["function"]["name"] for message in chat.messages for call in message.get("tool_calls", ())]
    try:
        text, spans = _spans(chat.messages, chat.tools, tokenizer)
    except TuneError as refusal:
        if not calls:
            raise
        # Nearly all templates want a call's arguments as an object; a few (DeepSeek V3) refuse it and want its JSON.
        try:
            text, spans = _spans([*map(_with_arguments_as_json, chat.messages)], chat.tools, tokenizer)
        except TuneError:
            raise refusal from None
    if lost := [name for name in calls if name not in text]:
        raise TuneError(f"the chat template leaves out the call of the tool {lost[0]}: it knows no tool calls")
    return text, spans


def _spans(messages: list[Message], tools: list | None, tokenizer: Tokenizer) -> tuple[str, list[Span]]:
    learned = {message["role"] for message in messages if message["train"]}
    spans: list[Span] = []
    if "assistant" in learned:
        text, spans = tokenizer.supervised_spans(messages, tools)
        if len(learned) == 1:
            return text, spans
    bare = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    text = _render(bare, tools, tokenizer)
    others = [
        _span_of(index, bare, tools, text, tokenizer)
        for index, message in enumerate(messages)
        if message["train"] and message["role"] != "assistant"
    ]
    return text, sorted([*spans, *others])


def _span_of(index: int, messages: list[Message], tools: list | None, text: str, tokenizer: Tokenizer) -> Span:
    """Where the content of a message of another role stands, with the end of turn behind it."""
    around = around_content(lambda probed: _render(probed, tools, tokenizer), messages, index)
    if not around or not (text.startswith(around[0]) and text.endswith(around[1])):
        raise TuneError(
            f"the chat template does not tell where message {index + 1} ({messages[index]['role']}) stands in the "
            "text: its role cannot be in train_on"
        )
    before, behind = around
    end = len(text) - len(behind)
    stops = map(tokenizer.decode, ([token] for token in tokenizer.stop_ids))
    return len(before), end + max((len(stop) for stop in stops if behind.startswith(stop)), default=0)


def _render(messages: list[Message], tools: list | None, tokenizer: Tokenizer) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools)


def _with_arguments_as_json(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
