"""One row on its way: parse, render and tokenize, or the reason why it has no tokens."""

import hashlib
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from decimal import Decimal
from typing import Any

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.block import Example, Places, RowBlock, TokenizedRow, flags_of
from tune.datasets.cut import split_between_turns, truncated
from tune.datasets.fit import Fit
from tune.datasets.parse.columns import OtherMeaning, parse, recognize
from tune.datasets.parse.content import Chat, Content, Dropped, Row, shown
from tune.datasets.parse.formats import FORMATS, Format, Kind
from tune.datasets.parse.pictures import with_pictures
from tune.datasets.reasons import CANNOT_BE_USED, LEFT_OUT
from tune.datasets.remarks import SHARED_TOKEN, remarks
from tune.datasets.render import (
    Conversation,
    Text,
    TrainOn,
    Turns,
    as_text,
    flagged,
    labelled,
    render_shorter,
    require_learned,
    require_whole_answers,
    shares_a_token,
    turns_of,
)
from tune.datasets.user_functions import applied
from tune.errors import TuneError, explained
from tune.tokenizers import Encoded, Tokenizer


@dataclass(frozen=True)
class RowReader:
    """Turn rows into tokens and labels. A pure function of each row, so it can run in any process.

    `format` is a known format, or the dotted path of a function that converts a row to a known format, or to None to
    leave it out. With `format=None`, each row's format is recognized by its columns. The other settings are those of
    `tune.datasets.load`.
    """

    tokenizer: Tokenizer
    format: Format | str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    filter: str | None = None
    train_on: TrainOn = "assistant"
    train_on_end_of_turn: bool = True
    turns: Turns = "together"
    ignore: Sequence[str] = ()
    extra_columns: Sequence[str] = ()
    kind: Kind = "supervised"
    digests: bool = True  # of rows, which decide which of them are held out
    pictures: str | None = None  # the folder of relative paths of pictures; None: the model reads only text

    def __call__(self, row: Any) -> TokenizedRow:
        """The examples of a row, uncut, or why it has none. `row` may be the TuneError of a malformed row.

        OtherMeaning is raised: what a format misreads in one row, it probably misreads in all.
        """
        digest = None
        try:
            _require_object(row)
            digest = digest_of_row(row) if self.digests else 0
            examples = [self._example(*each) for each in self._tokenized(row)]
            if self.turns == "as_seen":
                examples = _continued(examples)
            return TokenizedRow(self._with_columns(row, examples), digest=digest)
        except Dropped as reason:
            return TokenizedRow(dropped=str(reason), digest=digest)
        except OtherMeaning:
            raise
        except TuneError as error:
            return TokenizedRow(dropped=CANNOT_BE_USED, mistake=str(error), digest=digest)

    def blocks(
        self, rows: Sequence[tuple[int, Any]], places: Places, fit: Fit | None
    ) -> tuple[RowBlock, RowBlock | None]:
        """The block of numbered rows, and that of the rows that `fit` renders again.

        Raises OtherMeaning with the place of the row.
        """
        tokenized = []
        for number, row in rows:
            try:
                tokenized.append((number, self(row)))
            except OtherMeaning as error:
                raise OtherMeaning(f"{places.of(number)}: {error}") from None
        block = RowBlock.of(tokenized)
        too_long = fit.rows_to_render(block).tolist() if fit else []
        return block, self.cut([rows[at] for at in too_long], fit) if fit and too_long else None

    def cut(self, rows: Sequence[tuple[int, Any]], fit: Fit) -> RowBlock:
        """The block of rows whose conversations are too long, each cut after a message and rendered again."""
        return RowBlock.of((number, self._cut(row, fit)) for number, row in rows)

    def _cut(self, row: Any, fit: Fit) -> TokenizedRow:
        try:
            tokenized = self._tokenized(row)
            wholes = [self._labelled(rendered, encoded) for rendered, encoded in tokenized]
            limit = fit.limit([len(whole.tokens) for whole in wholes]) if len(wholes) > 1 else fit.max_seq_len
            examples: list[Example] = []
            for (rendered, encoded), whole in zip(tokenized, wholes, strict=True):
                pieces = [Example(whole)]
                if len(whole.tokens) > limit:
                    pieces = self._pieces(rendered, encoded, whole, limit, fit)
                examples += [_with(piece, rendered.content.columns) for piece in pieces]
            return TokenizedRow(self._with_columns(row, examples))
        except TuneError as error:
            return TokenizedRow(dropped=CANNOT_BE_USED, mistake=str(error))

    def _pieces(self, rendered: Text, encoded: Encoded, whole: Sample, limit: int, fit: Fit) -> list[Example]:
        """A conversation that is too long, cut or split between turns."""
        chat = rendered.content
        assert isinstance(chat, Chat)

        def again(chat: Chat) -> Sample:
            return render_shorter(chat, rendered, encoded, self.tokenizer, self.train_on, self.train_on_end_of_turn)

        if fit.too_long == "split":
            return split_between_turns(chat, limit, again)
        return [truncated(chat, whole, limit, again)]

    def _tokenized(self, row: Row) -> list[tuple[Text, Encoded]]:
        """The texts of a row with their tokens. Raises Dropped if the row is left out or has nothing to learn."""
        texts = []
        for content in self._parsed(row):
            content = flagged(content, self.train_on)
            require_learned(content)
            require_whole_answers(content, self.kind)
            source = Conversation(content, self.tokenizer) if isinstance(content, Chat) else None
            for part in turns_of(content) if self.turns == "as_seen" else [content]:
                rendered = as_text(part, self.tokenizer, self.train_on, source)
                if self.turns == "as_seen" and source and isinstance(part, Chat):
                    self.tokenizer.require_asked(part.messages, rendered.text, source.beginnings)
                texts.append(rendered)
        (encodings,) = self.tokenizer.encode_groups([[rendered.text for rendered in texts]])
        return list(zip(texts, encodings, strict=True))

    def _parsed(self, row: Row) -> list[Content]:
        """The contents of a row. Raises Dropped if the row is filtered out or cannot be trained on."""
        if self.filter and not applied(self.filter, "filter", row):
            raise Dropped(LEFT_OUT + self.filter)
        if isinstance(self.format, str):
            row = self._formatted(row, self.format)
            format = recognize(row, {}, f"the row from {self.format}", FORMATS[self.kind])
        else:
            format = self.format or recognize(row, self.columns, "the row", FORMATS[self.kind])
        if self.pictures is not None:
            read = {name: value for name, value in row.items() if name not in self.ignore}
            row = with_pictures(read, self.pictures)
        return parse(row, format, self.columns, (*self.ignore, *self.extra_columns))

    def _formatted(self, row: Row, function: str) -> Row:
        """The row that the user's function returns. Raises Dropped if it returns None."""
        made = applied(function, "format", row)
        if made is None:
            raise Dropped(LEFT_OUT + function)
        if not isinstance(made, dict):
            raise TuneError(f"{function} returned {shown(made)}; it must return a row, or None to leave it out")
        return made

    def _example(self, rendered: Text, encoded: Encoded) -> Example:
        """A text as tokens and labels, with remarks."""
        content = rendered.content
        notes = remarks(content, rendered.text, self.tokenizer)
        if shares_a_token(content, encoded):
            notes.append(SHARED_TOKEN)
        flags = flags_of(content, self._ends(rendered))
        return _with(Example(self._labelled(rendered, encoded), flags, notes), content.columns)

    def _labelled(self, rendered: Text, encoded: Encoded) -> Sample:
        return labelled(rendered, encoded, self.tokenizer, self.train_on_end_of_turn)

    def _ends(self, rendered: Text) -> bool:
        """Whether the last supervised message ends a turn. True for texts, and if ends of turns are not supervised."""
        content, text, learned, *_ = rendered
        if not self.train_on_end_of_turn or not learned or not isinstance(content, Chat):
            return True
        return self.tokenizer.ends_turn(text[learned[-1].start : learned[-1].end])

    def _with_columns(self, row: Row, examples: list[Example]) -> list[Example]:
        """Add the row's `extra_columns`: a number applies to each sample, a list has one per token."""
        for name in self.extra_columns if examples else ():
            value = np.asarray(row.get(name, "absent"))
            whole = len(examples[0].sample.tokens) + examples[0].cut
            is_integer = value.dtype != object and np.can_cast(value.dtype, np.int64)
            if not (is_integer or value.dtype.kind == "f") or value.ndim > 1:
                raise TuneError(f"{name} is {shown(row.get(name))}; extra_columns must be numbers, or lists of numbers")
            if value.ndim and (len(examples) > 1 or len(value) != whole):
                raise TuneError(
                    f"{name} has {len(value)} numbers for a row of {whole} tokens. A list in extra_columns needs a "
                    "number for each of the input_ids, and cannot be used with too_long=split"
                )
            # Ids and groups exceed the integers that fp32 holds. Lists of fractions are as large as the tokens.
            fraction = np.float32 if value.ndim else np.float64
            value = value.astype(np.int64 if is_integer else fraction)
            examples = [
                _with(each, {name: value[: len(each.sample.tokens)] if value.ndim else value}) for each in examples
            ]
        return examples


def _require_object(row: Any) -> None:
    if isinstance(row, TuneError):
        raise row
    if not isinstance(row, dict):
        raise TuneError(f"the row is {'null' if row is None else shown(row)}; it must be an object with columns")


def _with(example: Example, columns: Mapping[str, Any]) -> Example:
    """The example with more columns."""
    sample = example.sample
    return replace(example, sample=replace(sample, columns={**sample.columns, **columns})) if columns else example


def _continued(examples: Iterable[Example]) -> list[Example]:
    """Join each sample to the one before it that it continues, so that a conversation is stored once."""
    joined: list[Example] = []
    for example in examples:
        before = joined[-1] if joined else None
        # What is counted of each is the same, so that it stays right if the later one does not fit.
        is_alike = before is not None and (before.flags, before.remarks) == (example.flags, example.remarks)
        labels = _labels_of_both(before.sample, example.sample) if before and is_alike else None
        if before is None or labels is None:
            joined.append(example)
            continue
        sample = replace(example.sample, labels=labels[0], weights=labels[1])
        joins = [*before.joins, len(before.sample.tokens)]
        joined[-1] = replace(example, sample=sample, joins=joins)
    return joined


def _labels_of_both(sample: Sample, longer: Sample) -> tuple[np.ndarray, np.ndarray | None] | None:
    """The labels and weights of two samples in the longer one; None if it does not continue the other."""
    targets = np.flatnonzero(sample.labels != IGNORE)
    size = len(sample.tokens)
    if not len(targets) or not np.array_equal(sample.tokens, longer.tokens[:size]):
        return None
    end = int(targets[-1]) + 1  # of the labels
    if (longer.labels[:end] != IGNORE).any():
        return None
    weights = None
    if sample.weights is not None or longer.weights is not None:
        weights = np.append(sample.weights_or_ones[:end], longer.weights_or_ones[end:])
    return np.append(sample.labels[:end], longer.labels[end:]), weights


def digest_of_row(row: Row) -> int:
    """A number that is equal for equal rows. Raises TuneError if the row cannot be compared.

    It decides which rows are held out with `validation_seed` 0.
    """
    return int.from_bytes(hashlib.blake2b(f"0 {exact_text(row)}".encode(), digest_size=8).digest(), "big")


def exact_text(row: Any) -> str:
    """JSON that differs for different rows, in all digits. Raises TuneError for objects that cannot be pickled."""
    return json.dumps(row, default=_exact)


def _exact(value: Any) -> Any:
    """A JSON value for an object that JSON has not: its type and its whole content, unlike its `repr`."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if hasattr(value, "tolist"):  # of NumPy and torch
        return [name, str(value.dtype), value.tolist()]
    if isinstance(value, date | time | Decimal):
        return [name, str(value)]
    if isinstance(value, bytes):
        return [name, value.hex()]
    if isinstance(value, set | frozenset):  # its order differs between processes
        return [name, sorted(map(exact_text, value))]
    if isinstance(value, Mapping):
        return [name, *map(list, value.items())]
    with explained(f"the row holds {name}, which cannot be compared between runs", Exception):
        return [name, pickle.dumps(value, protocol=5).hex()]
