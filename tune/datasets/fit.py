"""Step 4: fit tokenized rows into `max_seq_len` tokens, hold rows out, and count what becomes of them.

Rows stay where they are stored: a sample is made of spans of the tokens of a block. Most rows fit and are taken as they
are, all rows of a block at once. Only rows that are too long are looked at one by one.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from tune.collators import IGNORE, Picture
from tune.datasets.accounting import NAMES_SHOWN, Accounting
from tune.datasets.block import CHAT, CLIPPED, ENDS, RENDERS, SPLITS, TURNS, Places, RowBlock, digest_of
from tune.datasets.parse.formats import Kind
from tune.datasets.reasons import (
    CANNOT_BE_USED,
    ELSEWHERE,
    EQUAL,
    EQUAL_AS_CUT,
    FOR_TRAINING,
    FULLY_MASKED,
    HELD_OUT,
    TOO_LONG,
)  # fmt: skip
from tune.datasets.samples import Samples, block_of_prefix

TooLong = Literal["truncate", "drop", "split", "error"]
PREFIX, WHOLE, RENDERED = range(3)
"""Where a span is: in the prefix of texts, in the block, or among the conversations that were rendered again. These are
the numbers of `Samples.blocks`."""


class Stretch(NamedTuple):
    """Tokens [start, start + length) of a place."""

    place: int
    start: int
    length: int


class Stretches(NamedTuple):
    """A sample of a row: its spans, whether its last target was cut off, and the sample of the block whose columns it
    has."""

    spans: Sequence[Stretch]
    is_cut: bool
    of: tuple[int, int]  # place, sample


@dataclass(slots=True)
class RowResult:
    """What becomes of a row that does not simply fit."""

    pieces: list[Stretches] = field(default_factory=list)
    dropped: str | None = None
    mistake: str | None = None
    cut: int = 0  # tokens
    clipped: bool = False  # cut inside an answer
    ends: bool = True
    notes: Sequence[str] = ()
    needs: int = 0  # tokens up to and with the first target, if all targets were cut off
    groups: Sequence[int] = ()  # of the pieces, if they do not all belong together


@dataclass(frozen=True)
class Fit:
    """How rows are fitted. See `tune.datasets.load`; `prefix` begins each piece of a text that begins with it."""

    max_seq_len: int
    too_long: TooLong | None = None
    kind: Kind = "supervised"
    as_seen: bool = False
    prefix: Sequence[int] = ()
    validation_fraction: float = 0.0
    validation_seed: int = 0
    validation: bool = False  # take the held-out rows instead of the training rows

    def rows_to_render(self, block: RowBlock) -> np.ndarray:
        """The rows with a conversation that is too long and may be cut after an earlier message."""
        if self.as_seen or self.too_long in ("drop", "error"):
            return np.empty(0, np.int64)
        is_long = (block.reasons == 0) & (_per_row(block, block.lengths) > self.max_seq_len)
        can_end_earlier = RENDERS | TURNS if self.too_long == "split" else RENDERS
        renders = _per_row(block, block.flags & can_end_earlier != 0) > 0
        return np.flatnonzero(is_long & renders)

    def limit(self, lengths: Sequence[int]) -> int:
        """The length to which the longest samples of a group are cut, so that the group has `max_seq_len` tokens."""
        left, limit = self.max_seq_len, 0
        for number, length in enumerate(sorted(lengths)):
            limit = left // (len(lengths) - number)
            left -= min(length, limit)
        return limit

    def __call__(self, block: RowBlock, rendered: RowBlock | None, places: Places, rows: int | None = None) -> Samples:
        """The samples of the first `rows` of a block. `rendered` has the rows of `rows_to_render`, cut; `places` names
        rows."""
        is_here = self._is_here(block)
        kept = self._kept(block, rows)
        total = _per_row(block, block.lengths)
        looked_at = kept & ((total > self.max_seq_len) | (self.as_seen & (block.counts > 1)))
        plain = kept & ~looked_at
        masked = _per_row(block, block.supervised == 0) > 0
        equal = _has_equal_answers(block) if self.kind != "supervised" else np.zeros(block.rows, bool)
        taken = plain & ~masked & ~equal
        cut = _Cut(self, block, rendered)
        results = {int(row): cut.result(int(row)) for row in np.flatnonzero(looked_at)}

        reasons = {row: result.dropped for row, result in results.items() if result.dropped}
        reasons |= dict.fromkeys(np.flatnonzero(plain & masked).tolist(), FULLY_MASKED)
        reasons |= dict.fromkeys(np.flatnonzero(plain & equal & ~masked).tolist(), EQUAL)
        accounting = self._counted(block, is_here, taken, results, reasons, places, rows)
        return cut.samples(np.flatnonzero(np.repeat(taken, block.counts)), results, accounting, places)

    def _kept(self, block: RowBlock, rows: int | None) -> np.ndarray:
        """Which rows belong to this dataset and can be used."""
        kept = self._is_here(block) & (block.reasons == 0)
        if rows is not None:
            kept[rows:] = False
        return kept

    def _is_here(self, block: RowBlock) -> np.ndarray:
        """Which rows are on this side of `validation_fraction`. What is no row is an error on both sides.

        The content decides: equal rows are on the same side, and a row stays there when others are added.
        """
        if not self.validation_fraction:
            return np.full(block.rows, not self.validation)
        drawn = block.contents
        if self.validation_seed:
            texts = (f"{self.validation_seed} {content}".encode() for content in drawn.tolist())
            digests = [hashlib.blake2b(text, digest_size=8).digest() for text in texts]
            drawn = np.array([int.from_bytes(digest, "big") for digest in digests], np.uint64)
        held_out = drawn < np.uint64(min(self.validation_fraction * 2**64, 2**64 - 1))
        return (held_out == self.validation) | (block.is_object == 0)

    def _counted(
        self, block: RowBlock, is_here: np.ndarray, taken: np.ndarray, results: dict[int, RowResult],
        reasons: dict[int, str], places: Places, rows: int | None,
    ) -> Accounting:  # fmt: skip
        """Count what became of the rows."""
        rows = block.rows if rows is None else min(rows, block.rows)
        elsewhere = FOR_TRAINING if self.validation else HELD_OUT
        dropped, first = Counter[str](), dict[str, int]()
        if others := int(rows - is_here[:rows].sum()):
            dropped[elsewhere] = others
        by_block = np.where(is_here, block.reasons, 0)[:rows]
        for number in np.unique(by_block[by_block > 0]).tolist():
            found = np.flatnonzero(by_block == number)
            dropped[block.dropped[number]] += len(found)
            first[block.dropped[number]] = int(found[0])
        for row in sorted(reasons):
            dropped[reasons[row]] += 1
            first[reasons[row]] = min(row, first.get(reasons[row], row))
        numbers = block.numbers.tolist() if block.mistakes else []
        mistakes = {numbers.index(number): mistake for number, mistake in block.mistakes}
        mistakes = {row: mistake for row, mistake in mistakes.items() if row < rows and is_here[row]}
        mistakes |= {row: result.mistake for row, result in results.items() if result.mistake}
        kept = [result for result in results.values() if result.pieces]
        remarks = _remarks(block, taken) + Counter(name for result in kept for name in dict.fromkeys(result.notes))
        has_groups = self.as_seen or self.kind != "supervised" or "group" in block.columns
        return Accounting(
            rows=rows,
            dropped=dropped,
            first_dropped={
                reason: places.of(int(block.numbers[row])) for reason, row in first.items() if reason not in ELSEWHERE
            },
            mistakes=[f"{places.of(int(block.numbers[row]))}: {mistakes[row]}" for row in sorted(mistakes)][
                :NAMES_SHOWN
            ],
            kept=int(taken.sum()) + len(kept),
            truncated=sum(result.cut > 0 for result in results.values()),
            cut_tokens=sum(result.cut for result in results.values()),
            clipped=sum(result.clipped for result in kept),
            split=0 if has_groups else sum(len(result.pieces) > 1 for result in kept),
            shortest_prompt=min(
                (each.needs for each in results.values() if not each.pieces and each.needs), default=None
            ),
            endless=int((_per_row(block, block.flags & ENDS == 0) > 0)[taken].sum())
            + sum(not each.ends for each in kept),
            remarks=remarks,
        )


class _Cut:
    """Looks at the rows of a block one by one."""

    def __init__(self, fit: Fit, block: RowBlock, rendered: RowBlock | None) -> None:
        self.fit, self.block, self.rendered = fit, block, rendered
        self.rendered_rows = {number: at for at, number in enumerate(rendered.numbers.tolist())} if rendered else {}
        prefix = np.array(fit.prefix, np.int32)
        self.tokens = {PREFIX: prefix, WHOLE: block.tokens}
        self.labels = {PREFIX: np.full(len(prefix), IGNORE, np.int32), WHOLE: block.labels}
        self.weights = {PREFIX: None, WHOLE: block.weights}
        if rendered:
            self.tokens[RENDERED], self.labels[RENDERED] = rendered.tokens, rendered.labels
            self.weights[RENDERED] = rendered.weights

    def result(self, row: int) -> RowResult:
        """What becomes of a row."""
        block = self.block
        samples = range(block.row_starts[row], block.row_starts[row + 1])
        if self.fit.as_seen:
            return self._turns(samples)
        lengths = block.lengths[samples.start : samples.stop].tolist()
        refusal = self._refusal(sum(lengths))
        if refusal:
            return refusal
        number = int(block.numbers[row])
        if number in self.rendered_rows:
            return self._of_rendered(number, samples)
        limit = self.fit.limit(lengths) if len(lengths) > 1 else self.fit.max_seq_len
        results = [self._one(sample, limit) for sample in samples]
        return results[0] if len(results) == 1 else self._group(results)

    def _refusal(self, total: int) -> RowResult | None:
        """The result of a row of so many tokens if it is too long and is not cut."""
        limit = self.fit.max_seq_len
        if total <= limit:
            return None
        if self.fit.too_long == "drop":
            return RowResult(dropped=TOO_LONG)
        if self.fit.too_long == "error":
            mistake = f"the row has {total:,} tokens, more than max_seq_len={limit}"
            return RowResult(dropped=CANNOT_BE_USED, mistake=mistake)
        return None

    def _one(self, sample: int, limit: int) -> RowResult:
        """A sample in `limit` tokens."""
        block, start = self.block, int(self.block.starts[sample])
        length, flags = int(block.lengths[sample]), int(block.flags[sample])
        too_long = self.fit.too_long or ("split" if flags & SPLITS else "truncate")
        too_long = "truncate" if flags & CHAT else too_long  # what is split between turns was rendered again
        if length > limit:
            limit = block.before_picture(start, limit)
        whole = (WHOLE, sample)
        cut, clipped = 0, False
        if length <= limit:
            pieces = [Stretches([Stretch(WHOLE, start, length)], False, whole)]
        elif too_long == "split":
            if block.token_columns:
                name = next(iter(block.token_columns))
                mistake = (
                    f"{name} has {length} numbers for a row of {length} tokens. A list in extra_columns needs a number "
                    "for each of the input_ids, and cannot be used with too_long=split"
                )
                return RowResult(dropped=CANNOT_BE_USED, mistake=mistake)
            pieces = [Stretches(spans, False, whole) for spans in self._split(start, length, limit)]
        else:
            pieces = [Stretches([Stretch(WHOLE, start, limit)], True, whole)] if limit else []
            cut, clipped = length - limit, bool(limit) and block.labels[start + limit - 1] != IGNORE
        notes = block.remarks[block.notes[sample]]
        result = RowResult(pieces, cut=cut, clipped=bool(clipped), ends=cut > 0 or bool(flags & ENDS), notes=notes)
        return self._learned(result, int(block.firsts[sample]))

    def _split(self, start: int, length: int, limit: int) -> Iterator[list[Stretch]]:
        """Spans of pieces that fit. The last label of a piece is the first token of the next.

        Models trained with BOS are far worse without it: if the whole begins with `prefix`, so does each piece. The
        token after the prefix is then supervised as the last label of the previous piece.
        """
        prefix = len(self.fit.prefix)
        if prefix >= limit or self.block.tokens[start : start + prefix].tolist() != [*self.fit.prefix]:
            prefix = 0
        yield [Stretch(WHOLE, start, limit)]
        step = limit - prefix
        for at in range(start + limit, start + length, step):
            span = Stretch(WHOLE, at, min(step, start + length - at))
            yield [Stretch(PREFIX, 0, prefix), span] if prefix else [span]

    def _of_rendered(self, number: int, samples: range) -> RowResult:
        """The result of a row whose conversations were cut and rendered again."""
        assert self.rendered is not None
        rendered, at = self.rendered, self.rendered_rows[number]
        if rendered.reasons[at]:
            mistakes = dict(rendered.mistakes)
            return RowResult(dropped=rendered.dropped[rendered.reasons[at]], mistake=mistakes.get(number))
        found = range(rendered.row_starts[at], rendered.row_starts[at + 1])
        notes = list(dict.fromkeys(name for each in samples for name in self.block.remarks[self.block.notes[each]]))
        ends = bool(np.all(self.block.flags[samples.start : samples.stop] & ENDS))
        results = []
        for number, each in enumerate(found):
            span = Stretch(RENDERED, int(rendered.starts[each]), int(rendered.lengths[each]))
            cut, clipped = int(rendered.cuts[each]), bool(rendered.flags[each] & CLIPPED)
            result = RowResult(
                [Stretches([span], False, (RENDERED, each))], cut=cut, clipped=clipped, ends=cut > 0 or ends
            )
            results.append((result, samples[min(number, len(samples) - 1)]))
        if len(samples) > 1:
            learned = [self._learned(each, int(self.block.firsts[sample])) for each, sample in results]
            return replace_notes(self._group(learned), notes)
        whole = _together([each for each, _ in results])
        whole = self._learned(whole, int(self.block.firsts[samples[0]]))
        whole.ends = whole.cut > 0 or ends
        return replace_notes(whole, notes)

    def _learned(self, result: RowResult, first: int) -> RowResult:
        """The result without pieces that have no target; dropped if all are such. `first` is that of the whole."""
        result.pieces = [piece for piece in result.pieces if self._supervised(piece)]
        if not result.pieces:
            result.dropped, result.needs = FULLY_MASKED, first + 2 if first >= 0 else 0
        return result

    def _group(self, results: list[RowResult]) -> RowResult:
        """The result of a row with several answers to compare."""
        if dropped := [result for result in results if result.dropped]:
            first = dropped[0]
            first.needs, first.pieces = len(results) * first.needs, []
            return first
        whole = _together(results)
        texts = [self._tokens(piece) for piece in whole.pieces]
        if any(np.array_equal(texts[0], text) for text in texts[1:]):
            limit = f"{EQUAL_AS_CUT} into max_seq_len={self.fit.max_seq_len}"
            return RowResult(dropped=limit if whole.cut else EQUAL)
        return whole

    def _turns(self, samples: range) -> RowResult:
        """The result of a row whose answers are learned one by one, each in the context in which it is asked for.

        Each answer is treated like a row of its own. The samples form groups of at most `max_seq_len` tokens: a group
        is in one micro-batch, which computes a shared prefix once.
        """
        results = [result for sample in samples for result in self._turn(sample)]
        if mistake := next((result for result in results if result.mistake), None):
            return mistake
        whole = _together(results)
        if not whole.pieces:
            return results[0]
        pieces: list[Stretches] = []
        for piece in whole.pieces:
            continued = self._continued(pieces[-1], piece) if pieces else None
            if continued:
                pieces[-1] = continued
            else:
                pieces.append(piece)
        whole.pieces = pieces
        number, room, groups = 0, self.fit.max_seq_len, []
        for piece in pieces:
            length = sum(span.length for span in piece.spans)
            if length > room:
                number, room = number + 1, self.fit.max_seq_len
            room -= length
            groups.append(number)
        whole.groups = groups
        return whole

    def _turn(self, sample: int) -> list[RowResult]:
        """The results of an answer and of the earlier ones that its sample continues. As many as fit, the last one cut,
        are one piece, which is that of the last."""
        block, limit, start = self.block, self.fit.max_seq_len, int(self.block.starts[sample])
        lengths = [*dict(block.joins).get(sample, ()), int(block.lengths[sample])]
        if lengths[-1] <= limit or not block.flags[sample] & CHAT:
            return [self._refusal(lengths[-1]) or self._one(sample, limit)]
        targets = np.flatnonzero(block.labels[start : start + lengths[-1]] != IGNORE)
        notes = block.remarks[block.notes[sample]]
        results, kept, before = [], None, 0
        for length in lengths:
            own = targets[(targets >= before - 1) & (targets < length)]
            before, is_cut = length, length > limit
            fits = block.before_picture(start, limit) if is_cut else length
            result = self._refusal(length)
            if result is not None:
                result.cut = length
            else:
                result = RowResult(cut=length - fits, clipped=is_cut and bool((own == fits - 1).any()), notes=notes)
                if (own < fits - is_cut).any():
                    kept = result, Stretches([Stretch(WHOLE, start, fits)], is_cut, (WHOLE, sample))
                else:
                    result.dropped, result.needs = FULLY_MASKED, int(own[0]) + 2 if len(own) else 0
            results.append(result)
        if kept:
            kept[0].pieces = [kept[1]]
        return results

    def _continued(self, piece: Stretches, longer: Stretches) -> Stretches | None:
        """`longer` with the labels of `piece` added, if `longer` begins with the tokens of `piece` up to its last
        target and supervises none of them. None otherwise."""
        tokens, longer_tokens = self._tokens(piece), self._tokens(longer)
        end = int(np.flatnonzero(self._labels(piece) != IGNORE)[-1]) + 2  # after the last target
        if not np.array_equal(tokens[:end], longer_tokens[:end]):
            return None
        if len(tokens) < end or (self._labels(longer)[: end - 1] != IGNORE).any():
            return None
        spans = [*_first(piece.spans, end - 1), *_after(longer.spans, end - 1)]
        return Stretches(spans, longer.is_cut, longer.of)

    def _tokens(self, piece: Stretches) -> np.ndarray:
        return _of_spans(self.tokens, piece.spans)

    def _pictures(self, piece: Stretches) -> list[Picture]:
        pictures: list[Picture] = []
        for place, start, length in piece.spans:
            block = self.block if place == WHOLE else self.rendered
            if block and place != PREFIX:
                pictures += block.pictures_in(slice(start, start + length))
        return pictures

    def _labels(self, piece: Stretches) -> np.ndarray:
        labels = _of_spans(self.labels, piece.spans)
        return np.append(labels[:-1], np.int32(IGNORE)) if piece.is_cut else labels

    def _supervised(self, piece: Stretches) -> int:
        return int(np.count_nonzero(self._labels(piece) != IGNORE))

    def _weight(self, piece: Stretches) -> float:
        targets = self._labels(piece) != IGNORE
        weights = [
            np.ones(span.length, np.float32) if (of_place := self.weights[span.place]) is None
            else of_place[span.start : span.start + span.length]
            for span in piece.spans
        ]  # fmt: skip
        return float(np.concatenate(weights)[targets].sum(dtype=np.float64))

    def samples(
        self, taken: np.ndarray, results: dict[int, RowResult], accounting: Accounting, places: Places
    ) -> Samples:
        """The samples `taken` as they are, and those of the results, in the order of their rows."""
        block = self.block
        row_of = np.repeat(np.arange(block.rows), block.counts)
        found = [(row, number, piece) for row, each in results.items() for number, piece in enumerate(each.pieces)]
        pieces = [piece for _, _, piece in found]
        spans = [span for piece in pieces for span in piece.spans]
        rows = np.concatenate([row_of[taken], np.array([row for row, _, _ in found], np.int64)])
        order = np.argsort(rows, kind="stable")
        counts = np.concatenate(
            [np.ones(len(taken), np.int32), np.array([len(each.spans) for each in pieces], np.int32)]
        )
        before = np.concatenate([[0], np.cumsum(counts)])
        of_spans = np.repeat(before[:-1][order], counts[order]) + _within(counts[order])

        def arranged(whole: np.ndarray, others: Sequence[int | float | bool]) -> np.ndarray:
            return np.concatenate([whole[taken], np.array(others, whole.dtype)])[order]

        def of_each_span(whole: np.ndarray, others: Sequence[int]) -> np.ndarray:
            return np.concatenate([whole, np.array(others, whole.dtype)])[of_spans]

        columns = {}
        blocks = {WHOLE: block, RENDERED: self.rendered or block}
        for name, values in block.columns.items():
            columns[name] = arranged(values, [blocks[place].columns[name][at] for place, at in (p.of for p in pieces)])
        is_grouped = self.fit.as_seen or (self.fit.kind != "supervised" and bool((block.counts > 1).any()))
        if is_grouped:
            numbers = [results[row].groups[number] if results[row].groups else 0 for row, number, _ in found]
            within = np.concatenate([np.zeros(len(taken), np.int64), np.array(numbers, np.int64)])[order]
            columns["group"] = rows[order] * 2**20 + within
        labels = [np.flatnonzero(self._labels(piece) != IGNORE) for piece in pieces]
        is_cut = np.concatenate([np.zeros(len(taken), bool), np.array([each.is_cut for each in pieces], bool)])
        return Samples(
            blocks=[block_of_prefix(self.fit.prefix), block, *([self.rendered] if self.rendered else [])],
            places=[places],
            stores=of_each_span(np.full(len(taken), WHOLE, np.int32), [span.place for span in spans]),
            starts=of_each_span(block.starts[taken], [span.start for span in spans]),
            span_lengths=of_each_span(block.lengths[taken], [span.length for span in spans]),
            spans=None if (counts == 1).all() else np.concatenate([[0], np.cumsum(counts[order], dtype=np.int64)]),
            is_cut=is_cut[order],
            lengths=arranged(block.lengths, [sum(span.length for span in piece.spans) for piece in pieces]),
            supervised=arranged(block.supervised, [len(each) for each in labels]),
            weight=arranged(block.weight, [self._weight(piece) for piece in pieces]),
            digests=arranged(block.digests, [digest_of(self._tokens(each), self._pictures(each)) for each in pieces]),
            firsts=arranged(block.firsts, [each[0] for each in labels]),
            numbers=block.numbers[rows[order]],
            pieces=np.zeros(len(rows), np.int32),
            columns=columns,
            is_grouped=is_grouped,
            accounting=accounting,
        )


def replace_notes(result: RowResult, notes: Sequence[str]) -> RowResult:
    return replace(result, notes=notes)


def _within(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... within each run of `counts` values."""
    starts = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(starts, counts)


def _together(results: Sequence[RowResult]) -> RowResult:
    """The result of a row from those of its parts."""
    return RowResult(
        [piece for result in results for piece in result.pieces],
        cut=sum(result.cut for result in results),
        clipped=any(result.clipped for result in results),
        ends=all(result.ends for result in results),
        notes=list(dict.fromkeys(name for result in results for name in result.notes)),
    )


def _of_spans(arrays: dict[int, np.ndarray], spans: Sequence[Stretch]) -> np.ndarray:
    parts = [arrays[span.place][span.start : span.start + span.length] for span in spans]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _first(spans: Sequence[Stretch], length: int) -> Iterator[Stretch]:
    """The spans of the first `length` tokens."""
    for span in spans:
        if length > 0:
            yield span._replace(length=min(span.length, length))
        length -= span.length


def _after(spans: Sequence[Stretch], length: int) -> Iterator[Stretch]:
    """The spans of the tokens after the first `length`."""
    for span in spans:
        left_out = min(max(length, 0), span.length)
        if left_out < span.length:
            yield Stretch(span.place, span.start + left_out, span.length - left_out)
        length -= span.length


def _per_row(block: RowBlock, values: np.ndarray) -> np.ndarray:
    """The sum of a value of samples over each row, int64."""
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return sums[block.row_starts[1:]] - sums[block.row_starts[:-1]]


def _has_equal_answers(block: RowBlock) -> np.ndarray:
    """Which rows have an answer that is equal to their first one."""
    firsts = np.repeat(block.row_starts[:-1], block.counts)
    if not len(firsts):
        return np.zeros(block.rows, bool)
    is_other = np.arange(len(firsts)) != firsts
    return _per_row(block, is_other & (block.digests == block.digests[firsts])) > 0


def _remarks(block: RowBlock, taken: np.ndarray) -> Counter[str]:
    """How many of the rows have each remark."""
    counted = Counter[str]()
    of_samples = np.repeat(taken, block.counts)
    numbers = np.where(of_samples, block.notes, 0)
    alone = np.repeat(block.counts == 1, block.counts)
    for number, count in enumerate(np.bincount(numbers[alone], minlength=1).tolist()):
        for name in block.remarks[number] if count else ():
            counted[name] += count
    for row in np.unique(np.repeat(np.arange(block.rows), block.counts)[~alone & (numbers > 0)]).tolist():
        samples = range(block.row_starts[row], block.row_starts[row + 1])
        counted.update({name for sample in samples for name in block.remarks[block.notes[sample]]})
    return counted
