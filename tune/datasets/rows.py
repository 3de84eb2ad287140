"""Rows to tokenised samples."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from tokenizers import Encoding

from tune.collators import IGNORE, Sample
from tune.datasets.formats.columns import OtherMeaning, recognise, renamed, require_meaning
from tune.datasets.formats.content import Answers, Chat, Content, Dropped, Plain, Row, shown
from tune.datasets.formats.formats import FORMATS, Format, Kind
from tune.datasets.formats.messages import is_empty_answer
from tune.datasets.labels import Draft, TrainOn, flagged, labelled, rendered, sample_of, shares_a_token
from tune.datasets.remarks import SHARED_TOKEN, columns_left_out, remarks
from tune.datasets.user_functions import applied
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

CANNOT_BE_USED = "cannot be used"
FULLY_MASKED = "fully masked"
TOO_LONG = "longer than max_seq_len"
HELD_OUT = "held out for validation"
FOR_TRAINING = "left for training"
LEFT_OUT = "left out by "  # a function of the user's

TooLong = Literal["truncate", "drop", "split", "error"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one row: samples, or the reason why it was dropped. `mistake` says why it cannot be used."""

    samples: Sequence[Sample] = ()
    dropped: str | None = None
    mistake: str | None = None
    cut: int = 0  # tokens that were cut off
    clipped: bool = False  # inside what is learned: the end of an answer is missing
    ends: bool = True  # the token that ends a turn or a text is learned
    remarks: Sequence[str] = ()  # no mistakes, but seldom meant
    needs: int = 0  # tokens before the first learned one, where all of these were cut off


@dataclass(frozen=True)
class RowReader:
    """Rows to what becomes of them: a pure function of each row, which may run in any process.

    `format` is a known format, or the dotted path of a function from a row to a row of a known one (or to None: the row
    is left out); None recognises each row by itself. The other settings are those of `tune.datasets.load`.
    """

    tokenizer: Tokenizer
    max_seq_len: int
    format: Format | str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    filter: str | None = None
    train_on: TrainOn = "assistant"
    train_on_end_of_turn: bool = True
    too_long: TooLong | None = None
    validation_fraction: float = 0.0
    validation_seed: int = 0
    validation: bool = False  # read the rows that are held out, and not the others
    bos_in_pieces: bool = True
    ignore: Sequence[str] = ()
    extra_columns: Sequence[str] = ()
    kind: Kind = "supervised"
    max_bad_share: float = 0.0  # of the rows; more that cannot be used are an error

    def __call__(self, rows: Sequence[tuple[str, Any]]) -> list[Outcome]:
        """What becomes of each of the rows, which come with their places; a TuneError in the stead of one is its
        mistake. They are tokenised together."""
        drafts = [_with_place(place, self._drafts, row) for place, row in rows]
        texts = [draft.text for each in drafts if isinstance(each, list) for draft in each]
        encodings = iter(self.tokenizer.encode_with_offsets(texts))

        def finished(place: str, row: Row, drafts: list[Draft]) -> Outcome:
            outcome = self._together(place, drafts, [next(encodings) for _ in drafts])
            return self._with_columns(row, outcome) if self.extra_columns else outcome

        return [
            _with_place(place, finished, place, row, each) if isinstance(each, list) else each
            for (place, row), each in zip(rows, drafts, strict=True)
        ]

    def sample(self, content: Content) -> Sample:
        """One content as one sample, however long."""
        return sample_of(content, self.tokenizer, self.train_on, self.train_on_end_of_turn)

    def _drafts(self, row: Any) -> list[Draft]:
        """What a row says: one content, or one for each of several answers. Raises Dropped if it is of no use."""
        if isinstance(row, TuneError):
            raise row
        if not isinstance(row, dict):
            raise TuneError(f"the row is {'null' if row is None else shown(row)}; it must be an object with columns")
        if self._is_held_out(row) != self.validation:
            raise Dropped(FOR_TRAINING if self.validation else HELD_OUT)
        if self.filter and not applied(self.filter, "filter", row):
            raise Dropped(LEFT_OUT + self.filter)
        if isinstance(self.format, str):
            row = applied(self.format, "format", row)
            if row is None:
                raise Dropped(LEFT_OUT + self.format)
            if not isinstance(row, dict):
                raise TuneError(f"{self.format} gives {shown(row)}; it must give a row, or None to leave it out")
            format = recognise(row, {}, f"what {self.format} gives", FORMATS[self.kind])
        else:
            format = self.format or recognise(row, self.columns, "the row", FORMATS[self.kind])
        row = renamed(row, format, self.columns)
        content = format.read(row)
        if isinstance(content, Answers):
            answers = zip(content.contents, content.columns, strict=True)
            return [replace(self._draft(row, format, each), columns=columns) for each, columns in answers]
        return [self._draft(row, format, content)]

    def _draft(self, row: Row, format: Format, content: Content) -> Draft:
        used_or_ignored = (*self.ignore, *self.extra_columns)
        require_meaning(row, format.columns, content, used_or_ignored)
        if isinstance(content, Chat):
            content = flagged(content, self.train_on)
            if not any(message["train"] for message in content.messages):
                answers = [each for each in content.messages[content.prompt :] if each["role"] == "assistant"]
                is_empty = "empty answer" if all(map(is_empty_answer, answers)) else "no message to learn"
                raise Dropped(is_empty if answers else "no assistant message")
        draft = rendered(content, self.tokenizer, self.train_on)
        found = remarks(content, draft.text, self.tokenizer) if isinstance(content, Chat) else []
        return replace(draft, remarks=found + columns_left_out(row, format, used_or_ignored, draft.text))

    def _with_columns(self, row: Row, outcome: Outcome) -> Outcome:
        """The samples with the row's `extra_columns`: a number is one of each sample, a list has one for each token."""
        samples, columns = outcome.samples, {}
        for name in self.extra_columns if samples else ():
            value = np.asarray(row.get(name, "absent"))
            whole = len(samples[0].tokens) + outcome.cut
            if value.dtype.kind not in "iufb" or value.ndim > 1:
                raise TuneError(f"{name} is {shown(row.get(name))}; extra_columns must be numbers, or lists of numbers")
            if value.ndim and (len(samples) > 1 or len(value) != whole):
                raise TuneError(
                    f"{name} has {len(value)} numbers for a row of {whole} tokens, which must be in one piece: a list "
                    "of extra_columns has one for each of the input_ids, and is not for too_long=split"
                )
            value = value.astype(np.float32)
            columns[name] = value[: len(samples[0].tokens)] if value.ndim else value
        return replace(outcome, samples=[replace(each, columns={**each.columns, **columns}) for each in samples])

    def _together(self, place: str, drafts: list[Draft], encodings: list[Encoding]) -> Outcome:
        """The samples of a row. Answers to one prompt are a group, which has `max_seq_len` tokens: if it is longer, its
        longest samples are cut to one length, and if one of them is of no use the row is dropped."""
        with_end = self.train_on_end_of_turn
        wholes = [labelled(*each, self.tokenizer, with_end) for each in zip(drafts, encodings, strict=True)]
        drafts = [
            replace(draft, remarks=[*draft.remarks, SHARED_TOKEN]) if shares_a_token(draft, encoding) else draft
            for draft, encoding in zip(drafts, encodings, strict=True)
        ]
        lengths = sorted(len(whole.tokens) for whole in wholes)
        reader = self
        if (total := sum(lengths)) > self.max_seq_len:
            if self.too_long == "drop":
                raise Dropped(TOO_LONG)
            if self.too_long == "error":
                raise TuneError(f"the row has {total:,} tokens, which is more than max_seq_len={self.max_seq_len}")
            left, limit = self.max_seq_len, 0
            for number, length in enumerate(lengths):
                limit = left // (len(lengths) - number)
                left -= min(length, limit)
            reader = replace(self, max_seq_len=limit)
        outcomes = [reader._finished(draft, whole) for draft, whole in zip(drafts, wholes, strict=True)]
        if len(outcomes) == 1:
            return outcomes[0]
        if dropped := [outcome for outcome in outcomes if outcome.dropped]:
            return replace(dropped[0], needs=len(outcomes) * dropped[0].needs)
        samples = [outcome.samples[0] for outcome in outcomes]
        if any(np.array_equal(samples[0].tokens, each.tokens) for each in samples[1:]):
            is_cut = any(outcome.cut for outcome in outcomes)
            raise Dropped(f"chosen equal to rejected{' as far as they fit' * is_cut}")
        group = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=7).digest(), "big")
        samples = [replace(sample, columns={**sample.columns, "group": group}) for sample in samples]
        return replace(_joined(outcomes), samples=samples)

    def _finished(self, draft: Draft, whole: Sample) -> Outcome:
        content, too_long = draft.content, self.too_long
        if too_long is None:
            too_long = "split" if isinstance(content, Plain) and not content.prompt else "truncate"
        shorten = self._split if too_long == "split" else self._truncated
        pieces = shorten(content, whole) if len(whole.tokens) > self.max_seq_len else Outcome([whole])
        outcome = _supervised(pieces, whole)
        samples = [replace(sample, columns=draft.columns) for sample in outcome.samples]
        outcome = replace(outcome, samples=samples, remarks=draft.remarks)
        if not isinstance(content, Chat):
            return outcome
        text = draft.text[slice(*draft.spans[-1])]
        ends = pieces.cut or not self.train_on_end_of_turn or self.tokenizer.ends_turn(text)
        return replace(outcome, ends=bool(ends))

    def _truncated(self, content: Content, whole: Sample) -> Outcome:
        """What fits: a conversation up to its last learned message that does, if there is one, anything else up to the
        last token."""
        if isinstance(content, Chat):
            ends = [end for end, message in enumerate(content.messages, 1) if message["train"]]
            if sample := self._longest(content, 0, 0, ends)[1]:
                return Outcome([sample], cut=len(whole.tokens) - len(sample.tokens))
        return _cut(whole, self.max_seq_len)

    def _split(self, content: Content, whole: Sample) -> Outcome:
        """Pieces that fit: a conversation between its turns, each piece behind the system message; anything else
        anywhere, and a piece's last label is then the next one's first token."""
        if not isinstance(content, Chat):
            return self._split_anywhere(whole)
        roles = [message["role"] for message in content.messages]
        head = content.prompt or int(roles[0] == "system")
        borders = [end for end in range(head + 1, len(roles)) if roles[end] == "user"] + [len(roles)]
        start, pieces = head, []
        while borders:
            end, sample = self._longest(content, head, start, borders)
            if sample:
                pieces.append(Outcome([sample]))
            else:  # a turn that is too long alone
                end, turn = borders[0], _messages_of(content, head, start, borders[0])
                pieces.append(self._truncated(turn, self.sample(turn)))
            start, borders = end, [border for border in borders if border > end]
        return _joined(pieces)

    def _split_anywhere(self, whole: Sample) -> Outcome:
        """Models that begin with BOS are far worse without: where the whole begins so, each piece does. What stands
        behind it is learned in the piece before."""
        prefix = self.tokenizer.prefix_ids if self.bos_in_pieces else []
        if len(prefix) >= self.max_seq_len or list(whole.tokens[: len(prefix)]) != prefix:
            prefix = []
        bos, no_labels = (np.array(ids, dtype=np.int32) for ids in (prefix, [IGNORE] * len(prefix)))
        tokens, labels = whole.tokens[len(prefix) :], whole.labels[len(prefix) :]
        length = self.max_seq_len - len(prefix)
        pieces = [slice(start, start + length) for start in range(0, len(tokens), length)]
        samples = [Sample(np.append(bos, tokens[piece]), np.append(no_labels, labels[piece])) for piece in pieces]
        samples[0].labels[: len(prefix)] = whole.labels[: len(prefix)]
        return Outcome(samples)

    def _longest(self, chat: Chat, head: int, start: int, ends: list[int]) -> tuple[int, Sample | None]:
        """The last of the `ends` up to which the messages from `start` on, behind the first `head` ones, fit, and these
        as a sample; None if not even those up to the first end do."""
        samples: dict[int, Sample] = {}

        def length(end: int) -> int:
            samples[end] = self.sample(_messages_of(chat, head, start, end))
            return len(samples[end].tokens)

        fitting = bisect_right(ends, self.max_seq_len, key=length)
        return (ends[fitting - 1], samples[ends[fitting - 1]]) if fitting else (start, None)

    def _is_held_out(self, row: Row) -> bool:
        """Decided by what is in the row, so that equal rows are on one side and a row stays there as others come."""
        if not self.validation_fraction:
            return False
        text = f"{self.validation_seed} {json.dumps(row, default=str)}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.validation_fraction * 2**64


def fitted(sample: Sample, max_seq_len: int) -> Outcome:
    """A sample, cut at its end if it is longer than `max_seq_len`; dropped if nothing is learned in it then."""
    pieces = _cut(sample, max_seq_len) if len(sample.tokens) > max_seq_len else Outcome([sample])
    return _supervised(pieces, sample)


def _cut(sample: Sample, max_seq_len: int) -> Outcome:
    """The start of a sample."""
    labels = np.array(sample.labels[:max_seq_len], dtype=np.int32)
    clipped = bool(labels[-1] != IGNORE)
    labels[-1] = IGNORE  # its target was cut off
    columns = {name: value[:max_seq_len] if np.ndim(value) else value for name, value in sample.columns.items()}
    start = replace(sample, tokens=sample.tokens[:max_seq_len], labels=labels, columns=columns)
    return Outcome([start], cut=len(sample.tokens) - max_seq_len, clipped=clipped)


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """What became of a row of which these are parts."""
    return Outcome(
        [sample for outcome in outcomes for sample in outcome.samples],
        cut=sum(outcome.cut for outcome in outcomes),
        clipped=any(outcome.clipped for outcome in outcomes),
        ends=all(outcome.ends for outcome in outcomes),
        remarks=list(dict.fromkeys(remark for outcome in outcomes for remark in outcome.remarks)),
    )


def _supervised(pieces: Outcome, whole: Sample) -> Outcome:
    """The pieces of the whole sample in which something is learned."""
    kept = [sample for sample in pieces.samples if (np.asarray(sample.labels) != IGNORE).any()]
    if kept:
        return replace(pieces, samples=kept)
    first = np.flatnonzero(np.asarray(whole.labels) != IGNORE)
    return replace(pieces, samples=(), dropped=FULLY_MASKED, needs=int(first[0]) + 1 if len(first) else 0)


def _messages_of(chat: Chat, head: int, start: int, end: int) -> Chat:
    return Chat([*chat.messages[:head], *chat.messages[start:end]], chat.tools)


def _with_place(place: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function gives, or what became of the row instead. A row that says something else than its format is an
    error at once: all rows are likely to do so."""
    try:
        return function(*arguments)
    except Dropped as reason:
        return Outcome(dropped=str(reason))
    except OtherMeaning as error:
        raise OtherMeaning(f"{place}: {error}") from None
    except TuneError as error:
        return Outcome(dropped=CANNOT_BE_USED, mistake=f"{place}: {error}")
