"""Turn rows into samples: parse, render and fit, for a few rows at a time."""

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
from tokenizers import Encoding

from tune.datasets.fit import CANNOT_BE_USED, FOR_TRAINING, HELD_OUT, LEFT_OUT, Outcome, TooLong, fit, fit_turns
from tune.datasets.parse.columns import OtherMeaning, parse, recognize
from tune.datasets.parse.content import Chat, Content, Dropped, Row, shown
from tune.datasets.parse.formats import FORMATS, Format, Kind
from tune.datasets.remarks import SHARED_TOKEN, remarks
from tune.datasets.render import (
    Example,
    Learned,
    TrainOn,
    Turns,
    as_text,
    flagged,
    labelled,
    render,
    require_learned,
    require_whole_answers,
    shares_a_token,
    turns_of,
)
from tune.datasets.samples import Samples, flat
from tune.datasets.user_functions import applied
from tune.errors import TuneError, explained
from tune.tokenizers import Tokenizer

Text = tuple[Content, str, list[Learned]]
"""A content, its text, and the supervised spans of the text."""


@dataclass(frozen=True)
class RowReader:
    """Turn rows into outcomes. A pure function of each row, so it can run in any process.

    `format` is a known format, or the dotted path of a function that converts a row to a known format, or to None to
    leave it out. With `format=None`, each row's format is recognized by its columns. The other settings are those of
    `tune.datasets.load`.
    """

    tokenizer: Tokenizer
    max_seq_len: int
    format: Format | str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    filter: str | None = None
    train_on: TrainOn = "assistant"
    train_on_end_of_turn: bool = True
    turns: Turns = "together"
    too_long: TooLong | None = None
    validation_fraction: float = 0.0
    validation_seed: int = 0
    validation: bool = False  # read the held-out rows instead of the training rows
    bos_in_pieces: bool = True
    ignore: Sequence[str] = ()
    extra_columns: Sequence[str] = ()
    kind: Kind = "supervised"
    max_bad_share: float = 0.0  # a larger share of unusable rows is an error

    def __call__(self, rows: Sequence[tuple[str, Any]]) -> list[Outcome]:
        """The outcome of each (place, row). A TuneError stands for an unreadable row. Rows are tokenized together."""
        places = [place for place, _ in rows]

        def each_row(step: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
            """The result of a step for each row. A row that an earlier step dropped keeps its outcome."""
            return [
                of_row[-1] if isinstance(of_row[-1], Outcome) else _attempted(place, step, *of_row)
                for place, *of_row in zip(places, *values, strict=True)
            ]

        contents = each_row(self._parse, [row for _, row in rows])
        texts = each_row(self._render, contents)
        examples = each_row(self._label, self._encodings(texts), texts)
        outcomes = zip(places, each_row(self._fit, rows, examples), strict=True)
        return [replace(outcome, place=place) for place, outcome in outcomes]

    def samples(self, rows: Sequence[tuple[str, Any]], ignored_columns: Sequence[str] = ()) -> Samples:
        """The samples of all rows, with the accounting of the rows."""
        format = self.format.name if isinstance(self.format, Format) else self.format
        return flat(self(rows), format, ignored_columns)

    def _parse(self, row: Any) -> list[Content]:
        """The contents of a row. Raises Dropped if the row is filtered out, held out or cannot be trained on."""
        if isinstance(row, TuneError):
            raise row
        if not isinstance(row, dict):
            raise TuneError(f"the row is {'null' if row is None else shown(row)}; it must be an object with columns")
        if self._is_held_out(row) != self.validation:
            raise Dropped(FOR_TRAINING if self.validation else HELD_OUT)
        if self.filter and not applied(self.filter, "filter", row):
            raise Dropped(LEFT_OUT + self.filter)
        if isinstance(self.format, str):
            row = self._formatted(row, self.format)
            format = recognize(row, {}, f"the row from {self.format}", FORMATS[self.kind])
        else:
            format = self.format or recognize(row, self.columns, "the row", FORMATS[self.kind])
        return parse(row, format, self.columns, (*self.ignore, *self.extra_columns))

    def _render(self, contents: list[Content]) -> list[Text]:
        """The texts of a row. Raises Dropped if a conversation has no supervised message."""
        texts = []
        for content in contents:
            content = flagged(content, self.train_on)
            require_learned(content)
            require_whole_answers(content, self.kind)
            for part in turns_of(content) if self.turns == "as_seen" else [content]:
                text, learned = as_text(part, self.tokenizer, self.train_on)
                if self.turns == "as_seen" and isinstance(part, Chat):
                    self.tokenizer.require_asked(part.messages, text, part.tools)
                texts.append((part, text, learned))
        return texts

    def _encodings(self, texts: Sequence[list[Text] | Outcome]) -> list[list[Encoding]]:
        """The tokens of all texts of all rows; an empty list for a dropped row."""
        of_rows = [[] if isinstance(of_row, Outcome) else [text for _, text, _ in of_row] for of_row in texts]
        encodings = iter(self.tokenizer.encode_with_offsets([text for of_row in of_rows for text in of_row]))
        return [[next(encodings) for _ in of_row] for of_row in of_rows]

    def _label(self, encodings: list[Encoding], texts: list[Text]) -> list[Example]:
        """The tokens and labels of a row's texts, with remarks."""
        examples = []
        for (content, text, learned), encoding in zip(texts, encodings, strict=True):
            sample = labelled(content, text, learned, encoding, self.tokenizer, self.train_on_end_of_turn)
            notes = remarks(content, text, self.tokenizer)
            if shares_a_token(content, encoding):
                notes.append(SHARED_TOKEN)
            examples.append(Example(content, sample, self._ends(content, text, learned), notes))
        return examples

    def _ends(self, content: Content, text: str, learned: list[Learned]) -> bool:
        """Whether the last supervised message ends a turn. True for texts, and if ends of turns are not supervised."""
        if not self.train_on_end_of_turn or not learned or not isinstance(content, Chat):
            return True
        return self.tokenizer.ends_turn(text[learned[-1].start : learned[-1].end])

    def _fit(self, row: tuple[str, Row], examples: list[Example]) -> Outcome:
        place, columns = row
        prefix = self.tokenizer.prefix_ids if self.bos_in_pieces else []
        again = partial(
            render, tokenizer=self.tokenizer, train_on=self.train_on, train_on_end_of_turn=self.train_on_end_of_turn
        )
        fit_row = fit_turns if self.turns == "as_seen" else fit
        outcome = fit_row(examples, self.max_seq_len, self.too_long, again, prefix, place)
        return self._with_columns(columns, outcome) if self.extra_columns else outcome

    def _formatted(self, row: Row, function: str) -> Row:
        """The row that the user's function returns. Raises Dropped if it returns None."""
        made = applied(function, "format", row)
        if made is None:
            raise Dropped(LEFT_OUT + function)
        if not isinstance(made, dict):
            raise TuneError(f"{function} returned {shown(made)}; it must return a row, or None to leave it out")
        return made

    def _with_columns(self, row: Row, outcome: Outcome) -> Outcome:
        """Add the row's `extra_columns` to its samples: a number applies to each sample, a list has one per token."""
        samples, columns = outcome.samples, {}
        for name in self.extra_columns if samples else ():
            value = np.asarray(row.get(name, "absent"))
            whole = len(samples[0].tokens) + outcome.cut
            is_integer = value.dtype != object and np.can_cast(value.dtype, np.int64)
            if not (is_integer or value.dtype.kind == "f") or value.ndim > 1:
                raise TuneError(f"{name} is {shown(row.get(name))}; extra_columns must be numbers, or lists of numbers")
            if value.ndim and (len(samples) > 1 or len(value) != whole):
                raise TuneError(
                    f"{name} has {len(value)} numbers for a row of {whole} tokens. A list in extra_columns needs a "
                    "number for each of the input_ids, and cannot be used with too_long=split"
                )
            # Ids and groups exceed the integers that fp32 holds. Lists of fractions are as large as the tokens.
            fraction = np.float32 if value.ndim else np.float64
            value = value.astype(np.int64 if is_integer else fraction)
            columns[name] = value[: len(samples[0].tokens)] if value.ndim else value
        samples = [replace(sample, columns={**sample.columns, **columns}) for sample in samples]
        return replace(outcome, samples=samples)

    def _is_held_out(self, row: Row) -> bool:
        """Decide by the row's content: equal rows are on the same side, and a row stays there when others are added."""
        if not self.validation_fraction:
            return False
        text = f"{self.validation_seed} {exact_text(row)}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.validation_fraction * 2**64


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


def _attempted(place: str, step: Callable[..., Any], *values: Any) -> Any:
    """The result of a step, or the outcome of a row that the step rejects.

    OtherMeaning is raised at once: what a format misreads in one row, it probably misreads in all.
    """
    try:
        return step(*values)
    except Dropped as reason:
        return Outcome(dropped=str(reason))
    except OtherMeaning as error:
        raise OtherMeaning(f"{place}: {error}") from None
    except TuneError as error:
        return Outcome(dropped=CANNOT_BE_USED, mistake=f"{place}: {error}")
