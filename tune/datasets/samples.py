"""Millions of samples as spans of stored rows, in memory or mapped from files."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tune.collators import IGNORE, Picture, Sample
from tune.datasets.accounting import Accounting
from tune.datasets.block import Places, RowBlock, digest_of
from tune.datasets.reasons import EQUAL_AS_CUT, SHARED_LIMIT
from tune.errors import TuneError

ARRAYS = (
    *("stores", "starts", "span_lengths", "is_cut"),
    *("lengths", "supervised", "weight", "digests", "firsts", "numbers", "pieces"),
)
RUN = 2**22  # tokens that are hashed at once


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one or several blocks: arrays with a value per sample, or per span of tokens in a block.

    - a sample is one span, or `spans[i]` to `spans[i + 1]`; `is_cut`: the target of its last token was cut off
    - `lengths` and `supervised` count tokens; `weight` sums the weights of the supervised ones
    - `digests` are equal for equal tokens; `firsts` are the positions of first targets
    - `numbers` and `pieces` lead to the row in the source

    `accounting` counts the source's rows. Only a whole dataset has a `fingerprint`.
    """

    blocks: Sequence[RowBlock]  # the first one has the prefix of texts
    places: Sequence[Places]
    stores: np.ndarray  # of a span: the number of its block
    starts: np.ndarray
    span_lengths: np.ndarray
    is_cut: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    weight: np.ndarray
    digests: np.ndarray
    firsts: np.ndarray
    numbers: np.ndarray
    pieces: np.ndarray
    columns: dict[str, np.ndarray]
    accounting: Accounting
    spans: np.ndarray | None = None
    is_grouped: bool = False  # the column group was numbered by `Fit`, within a block
    added: dict[str, np.ndarray] = field(default_factory=dict)  # further columns, with a value per sample or per token
    fingerprint: str = ""  # equal for equal tokens, labels and columns
    largest_token: int = 0
    learned_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # sorted
    copies: int = 0  # samples with the tokens of an earlier one

    @classmethod
    def joined(cls, parts: "Sequence[Samples]", source: str) -> "Samples":
        """The samples of all parts. Raises TuneError, which names the source, if there is none."""
        accounting = sum((part.accounting for part in parts), Accounting()).with_source(source)
        if not sum(map(len, parts)):
            raise nothing_left(accounting)
        blocks, stores = [*parts[0].blocks[:1]], []
        for part in parts:
            before = len(blocks) - 1
            stores.append(part.stores + np.where(part.stores > 0, before, 0).astype(np.int32))
            blocks += part.blocks[1:]
        counts = np.concatenate([part.span_counts for part in parts])

        def together(name: str) -> Any:
            return np.concatenate([getattr(part, name) for part in parts])

        samples = cls(
            blocks=blocks,
            places=[place for part in parts for place in part.places],
            stores=np.concatenate(stores),
            **{name: together(name) for name in ("starts", "span_lengths", "is_cut", "lengths", "supervised")},
            **{name: together(name) for name in ("weight", "digests", "firsts", "numbers")},
            pieces=np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts]),
            columns=_joined_columns([part for part in parts if len(part)], source),
            accounting=accounting,
            spans=None if (counts == 1).all() else np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
        )
        weight = samples.weight if samples.is_weighted else None
        accounting = accounting.with_samples(samples.lengths, samples.supervised, weight)
        return samples.hashed(accounting)

    def hashed(self, accounting: Accounting) -> "Samples":
        """A copy with `accounting` and what all tokens together decide: the fingerprint and the numbers after it."""
        tokens_digest, labels_digest, weights_digest = (hashlib.blake2b(digest_size=16) for _ in range(3))
        largest, is_learned = 0, np.zeros(0, bool)
        for tokens, labels, weights in self.runs():
            tokens_digest.update(tokens.data)
            labels_digest.update(labels.data)
            if self.is_weighted:
                weights_digest.update(weights.data)
            largest = max(largest, int(tokens.max()))
            highest = int(labels.max())
            if highest >= len(is_learned):
                is_learned = np.append(is_learned, np.zeros(highest + 1 - len(is_learned), bool))
            is_learned[labels[labels != IGNORE]] = True
        digests = [tokens_digest, labels_digest, hashlib.blake2b(self.lengths.astype(np.int64).data, digest_size=16)]
        digests += [hashlib.blake2b(values.data, digest_size=16) for values in self.columns.values()]
        digests += [self._digest_of_column(name) for name in self.token_columns]
        if self.is_weighted:
            digests.append(weights_digest)
        if self.has_pictures:
            digests.append(self._digest_of_pictures())
        fingerprint = hashlib.blake2b(b"".join(digest.digest() for digest in digests), digest_size=16).hexdigest()
        copies = len(self) - len(np.unique(self.digests))
        return replace(
            self, accounting=accounting, fingerprint=fingerprint, largest_token=largest, copies=copies,
            learned_tokens=np.flatnonzero(is_learned).astype(np.int32),
        )  # fmt: skip

    @cached_property
    def prompts(self) -> np.ndarray:
        """Numbers that are equal for equal prompts: the tokens up to the first target."""
        digests = []
        for sample, first in zip(self, self.firsts.tolist(), strict=True):
            before = [picture for picture in sample.pictures if picture.start <= first]
            digests.append(digest_of(sample.tokens[: first + 1], before))
        return np.array(digests, np.uint64)

    @property
    def span_counts(self) -> np.ndarray:
        """The number of spans of each sample."""
        return np.ones(len(self), np.int64) if self.spans is None else np.diff(self.spans)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.sample, range(len(self)))

    @cached_property
    def is_weighted(self) -> bool:
        """Whether some supervised tokens count less than others."""
        return bool((self.weight != self.supervised).any())

    @cached_property
    def token_columns(self) -> list[str]:
        """The names of the stored columns with a value per token."""
        return list(dict.fromkeys(name for block in self.blocks for name in block.token_columns))

    def sample(self, index: int) -> Sample:
        """One sample; a view if it is stored in one piece."""
        spans = self.spans_of(index)
        tokens, labels = self._labelled(spans, bool(self.is_cut[index]))
        weights = None
        if self.is_weighted:
            weights = _joined([self.blocks[store].weights_or_ones[part] for store, part in spans])
        pictures = self._pictures(spans)
        return Sample(tokens, labels, index, self.columns_of(index), weights, self.place_of(index), pictures)

    @cached_property
    def has_pictures(self) -> bool:
        """Whether a block has pictures."""
        return any(block.pictures for block in self.blocks)

    def _pictures(self, spans: Sequence[tuple[int, slice]]) -> tuple[Picture, ...]:
        """The pictures of spans, with their places in the sample."""
        pictures, before = list[Picture](), 0
        for store, part in spans if self.has_pictures else ():
            shown = self.blocks[store].pictures_in(part)
            pictures += [replace(picture, start=picture.start + before) for picture in shown]
            before += part.stop - part.start
        return tuple(pictures)

    def spans_of(self, index: int) -> list[tuple[int, slice]]:
        """The stores of a sample, with the tokens in each."""
        numbers = range(index, index + 1) if self.spans is None else range(self.spans[index], self.spans[index + 1])
        spans = []
        for number in numbers:
            start = int(self.starts[number])
            spans.append((int(self.stores[number]), slice(start, start + int(self.span_lengths[number]))))
        return spans

    def place_of(self, index: int) -> str:
        """The place of a sample's row."""
        return self.places[self.pieces[index]].of(int(self.numbers[index]))

    def columns_of(self, index: int) -> dict[str, Any]:
        """The columns of one sample."""
        columns = {name: values[index] for name, values in self.columns.items()}
        for name in self.token_columns:
            columns[name] = _joined(
                [self.blocks[store].token_columns[name][part] for store, part in self.spans_of(index)]
            )
        for name, values in self.added.items():
            is_per_sample = len(values) == len(self)
            columns[name] = (
                values[index] if is_per_sample else values[self.ends[index] - self.lengths[index] : self.ends[index]]
            )
        return columns

    @cached_property
    def ends(self) -> np.ndarray:
        """The number of tokens up to the end of each sample."""
        return np.cumsum(self.lengths, dtype=np.int64)

    def runs(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """All tokens, labels and weights in order: as many samples at once as lie one behind the other."""
        first = np.arange(len(self)) if self.spans is None else self.spans[:-1]
        whole = (self.span_counts == 1) & ~self.is_cut.astype(bool)
        follows = whole[1:] & whole[:-1] & (self.stores[first[1:]] == self.stores[first[:-1]])
        follows &= self.starts[first[1:]] == self.starts[first[:-1]] + self.span_lengths[first[:-1]]
        borders = [*np.flatnonzero(~follows) + 1, len(self)]
        at = 0
        for border in borders:
            if whole[at]:
                block = self.blocks[self.stores[first[at]]]
                start, size = int(self.starts[first[at]]), int(self.lengths[at:border].sum(dtype=np.int64))
                for part in range(start, start + size, RUN):
                    span = slice(part, min(part + RUN, start + size))
                    yield block.tokens[span], block.labels[span], np.ascontiguousarray(block.weights_or_ones[span])
            else:
                sample = self.sample(at)
                yield sample.tokens, sample.labels, sample.weights_or_ones
            at = border

    def as_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The arrays by name and the rest as JSON, to store them beside the blocks; `from_arrays` is the way back."""
        arrays = {name: getattr(self, name) for name in (*ARRAYS, "learned_tokens")}
        if self.spans is not None:
            arrays["spans"] = self.spans
        arrays |= {f"column-{name}": values for name, values in self.columns.items()}
        rest = {name: getattr(self, name) for name in ("fingerprint", "largest_token", "copies")}
        return arrays, rest | {"accounting": vars(self.accounting), "columns": [*self.columns]}

    @classmethod
    def from_arrays(
        cls, arrays: dict[str, Any], rest: dict[str, Any], blocks: Sequence[RowBlock], places: Sequence[Places]
    ) -> "Samples":
        columns = {name: arrays.pop(f"column-{name}") for name in rest.pop("columns")}
        accounting = Accounting.from_dict(rest.pop("accounting"))
        return cls(blocks=blocks, places=places, **arrays, **rest, columns=columns, accounting=accounting)

    def _labelled(self, spans: Sequence[tuple[int, slice]], is_cut: bool) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and labels of spans. A target at the end of one is the first token of the next."""
        tokens = _joined([self.blocks[store].tokens[part] for store, part in spans])
        labels = _joined([self.blocks[store].labels[part] for store, part in spans])
        if len(spans) == 1 and not is_cut:
            return tokens, labels
        labels, end = np.array(labels, np.int32), 0
        for _, part in spans[:-1]:
            end += part.stop - part.start
            if labels[end - 1] != IGNORE:
                labels[end - 1] = tokens[end]
        if is_cut:
            labels[-1] = IGNORE
        return tokens, labels

    def _digest_of_pictures(self) -> "hashlib.blake2b":
        digest = hashlib.blake2b(digest_size=16)
        for index in range(len(self)):
            for picture in self._pictures(self.spans_of(index)):
                digest.update(f"{index} {picture.digest} {picture.start}".encode())
        return digest

    def _digest_of_column(self, name: str) -> "hashlib.blake2b":
        digest = hashlib.blake2b(digest_size=16)
        for index in range(len(self)):
            digest.update(np.ascontiguousarray(self.columns_of(index)[name]).data)
        return digest


def block_of_prefix(prefix: Sequence[int]) -> RowBlock:
    """The tokens with which pieces of texts begin."""
    labels = np.full(len(prefix), IGNORE, np.int32)
    return replace(RowBlock.of([]), tokens=np.array(prefix, np.int32), labels=labels)


def nothing_left(accounting: Accounting) -> TuneError:
    """The error for a source without a usable row."""
    if accounting.rows == 0:
        row = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
        return TuneError(f"{accounting.source} has no rows: it needs at least one, such as {row}")
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in accounting.dropped.most_common())
    message = f"{accounting.source}: none of the {accounting.rows:,} rows can be used: {reasons}"
    if shortest := accounting.shortest_prompt:
        message += ". max_seq_len cuts off every answer: the shortest prompt, with the first token of its answer, has "
        message += f"{shortest} tokens. Set max_seq_len to at least {shortest}, and higher for whole answers"
    elif any(reason.startswith(EQUAL_AS_CUT) for reason in accounting.dropped):
        message += f". {SHARED_LIMIT[0].upper()}{SHARED_LIMIT[1:]}"
    return TuneError(message)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _joined_columns(parts: Sequence[Samples], source: str) -> dict[str, np.ndarray]:
    """The columns of parts, none of which is empty."""
    samples, columns = sum(map(len, parts)), {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        values = [part.columns[name] for part in parts if name in part.columns]
        if name == "group" and parts[0].is_grouped:
            # Two neighbors of different parts never have the same number.
            values = [of_part + (number << 40) for number, of_part in enumerate(values)]
        columns[name] = np.concatenate(values)
        if len(columns[name]) != samples:
            raise TuneError(
                f"{source}: column {name} has {len(columns[name]):,} values for {samples:,} samples; it must have one "
                "value for each sample or for each token"
            )
    return columns
