"""Contents to text with the spans to learn, and that to tokens with labels."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from tokenizers import Encoding

from tune.collators import IGNORE, Sample
from tune.datasets.formats import Chat, Content, Plain, Tokens
from tune.datasets.train_on import TrainOn, learned_roles, learned_text
from tune.errors import TuneError
from tune.tokenizers import Span, Tokenizer


@dataclass(frozen=True, slots=True)
class Draft:
    """A row's content as text, with the character spans to learn."""

    content: Content
    text: str = ""
    spans: Sequence[Span] = ()
    remarks: Sequence[str] = ()
    columns: Mapping[str, float] = field(default_factory=dict)


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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TuneError("the text holds half of a character pair (a lone \\ud800-\\udfff escape)") from error
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
            ids = [*ids, _eos(tokenizer)]
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


def _before_end_of_turn(tokens: np.ndarray, first: int, last: int, tokenizer: Tokenizer) -> int:
    """Where the tokens [first, last) end without those that end a turn and the blanks behind and between them."""
    end = last
    for at in range(last - 1, first - 1, -1):
        if int(tokens[at]) in tokenizer.stop_ids:
            end = at
        elif tokenizer.decode([int(tokens[at])]).strip():
            break
    return end


def _eos(tokenizer: Tokenizer) -> int:
    if tokenizer.eos_id is None:
        raise TuneError(
            f"the tokenizer in {tokenizer.path} names no eos_token, and a model learns from it where a text ends: "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer.eos_id
