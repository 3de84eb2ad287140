"""Millions of tokenized samples as flat arrays, in memory or mapped from files."""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.accounting import Accounting
from tune.datasets.fit import EQUAL_AS_CUT, SHARED_LIMIT, Outcome
from tune.errors import TuneError

OF_SAMPLES = ("lengths", "supervised", "supervised_weight", "digests", "places")
"""The arrays of `Samples` with a value for each sample."""
NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Samples:
    """Concatenated samples (int32): sample i has `lengths[i]` tokens, of which `supervised[i]` are supervised.

    `digests` (uint64) are equal for equal tokens. `places` are UTF-8. A column has a value for each sample, or for each
    token. `accounting` counts the source rows. Only a whole dataset has a `fingerprint`, not the samples of a few rows.
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    digests: np.ndarray
    columns: dict[str, np.ndarray]
    accounting: Accounting
    weights: np.ndarray | None = None  # fp32, per token; None: 1
    supervised_weight: np.ndarray = field(
        default_factory=lambda: np.empty(0)
    )  # fp64, per sample: sum over its supervised tokens
    places: np.ndarray = field(default_factory=lambda: np.empty(0, "S1"))  # of each sample's row: "chats.jsonl:12"
    renamed: dict[str, str] = field(default_factory=dict)  # files in `places` whose name has changed since
    fingerprint: str = ""  # equal for equal tokens, labels and columns
    largest_token: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.sample, range(len(self)))

    @cached_property
    def starts(self) -> np.ndarray:
        """The position in `tokens` where each sample begins, and the end of the last sample."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def sample(self, index: int) -> Sample:
        """One sample, as a view."""
        span = slice(self.starts[index], self.starts[index + 1])
        weights = None if self.weights is None else self.weights[span]
        columns, place = self.columns_of(index, span), self.place_of(index)
        return Sample(self.tokens[span], self.labels[span], index, columns, weights, place)

    def place_of(self, index: int) -> str:
        """The place of a sample's row, with today's name of its file."""
        place = self.places[index].decode()
        if place in self.renamed:  # a file that is one row
            return self.renamed[place]
        file, colon, row = place.rpartition(":")
        return f"{self.renamed.get(file, file)}{colon}{row}"

    def columns_of(self, index: int, tokens: slice) -> dict[str, Any]:
        """The columns of one sample; `tokens` is its slice of the token arrays."""
        return {name: values[index if len(values) == len(self) else tokens] for name, values in self.columns.items()}


def flat(outcomes: Sequence[Outcome], format: str | None = None, ignored_columns: Sequence[str] = ()) -> Samples:
    """The samples of a few rows as arrays. `format` and `ignored_columns` go into their accounting."""
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    places = [sample.place or outcome.place for outcome in outcomes for sample in outcome.samples]
    tokens = [np.asarray(sample.tokens, dtype=np.int32) for sample in samples]
    labels = [np.asarray(sample.labels, dtype=np.int32) for sample in samples]
    is_weighted = any(sample.weights is not None for sample in samples)
    columns = defaultdict(list)
    for name, value in (item for sample in samples for item in sample.columns.items()):
        columns[name].append(np.asarray(value))
    digests = b"".join(hashlib.blake2b(ids.data, digest_size=8).digest() for ids in tokens)
    return Samples(
        np.concatenate([NONE, *tokens]),
        np.concatenate([NONE, *labels]),
        np.array([len(targets) for targets in labels], dtype=np.int64),
        np.array([np.count_nonzero(targets != IGNORE) for targets in labels], dtype=np.int64),
        np.frombuffer(digests, dtype="<u8"),
        {name: np.concatenate(values) if values[0].ndim else np.stack(values) for name, values in columns.items()},
        Accounting.of_rows(outcomes, format, ignored_columns),
        np.concatenate([sample.weights_or_ones for sample in samples]) if is_weighted else None,
        np.array([_weight_of(sample) for sample in samples], dtype=np.float64),
        np.array([place.encode() for place in places], dtype=np.bytes_),
    )


def _weight_of(sample: Sample) -> float:
    """The sum of the weights of a sample's supervised tokens."""
    is_learned = np.asarray(sample.labels) != IGNORE
    return float(is_learned.sum() if sample.weights is None else sample.weights[is_learned].sum(dtype=np.float64))


def joined(chunks: Iterable[Samples], source: str) -> Samples:
    """All chunks as one, in memory. Raises TuneError, which names the source, if no sample is left."""
    tokens, labels = io.BytesIO(), io.BytesIO()
    others = write(chunks, source, tokens, labels)
    tokens_array, labels_array = (np.frombuffer(file.getbuffer(), dtype=np.int32) for file in (tokens, labels))
    return Samples(tokens=tokens_array, labels=labels_array, **others)


def write(chunks: Iterable[Samples], source: str, tokens: BinaryIO, labels: BinaryIO) -> dict[str, Any]:
    """Write the tokens and labels of all chunks, and return the other fields of their `Samples`."""
    arrays: dict[str, list[np.ndarray]] = defaultdict(list)
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    weights, is_weighted = list[np.ndarray](), False
    accounting = Accounting().with_source(source)
    largest = 0
    digests = [hashlib.blake2b(digest_size=16) for _ in range(3)]
    for chunk in chunks:
        accounting += chunk.accounting
        if not len(chunk):
            continue
        tokens.write(chunk.tokens.data)
        labels.write(chunk.labels.data)
        for digest, values in zip(digests, (chunk.tokens, chunk.labels, chunk.lengths), strict=True):
            digest.update(values.data)
        for name in OF_SAMPLES:
            arrays[name].append(getattr(chunk, name))
        weights.append(np.broadcast_to(np.float32(1), len(chunk.tokens)) if chunk.weights is None else chunk.weights)
        is_weighted |= chunk.weights is not None
        for name, values in chunk.columns.items():
            columns[name].append(values)
        largest = max(largest, int(chunk.tokens.max()))
    if not arrays:
        raise _nothing_left(accounting)
    whole, whole_columns = ({name: np.concatenate(parts) for name, parts in of.items()} for of in (arrays, columns))
    _require_values_of_all(whole_columns, whole["lengths"], accounting.source)
    of_tokens = np.concatenate(weights) if is_weighted else None
    more = [*whole_columns.values()] if of_tokens is None else [*whole_columns.values(), of_tokens]
    digests += [hashlib.blake2b(values.data, digest_size=16) for values in more]
    fingerprint = hashlib.blake2b(b"".join(digest.digest() for digest in digests), digest_size=16).hexdigest()
    accounting = accounting.with_samples(
        whole["lengths"], whole["supervised"], whole["supervised_weight"] if is_weighted else None
    )
    return {
        **whole, "weights": of_tokens, "columns": whole_columns, "accounting": accounting, "fingerprint": fingerprint,
        "largest_token": largest,
    }  # fmt: skip


def _require_values_of_all(columns: dict[str, np.ndarray], lengths: np.ndarray, source: str) -> None:
    for name, values in columns.items():
        if len(values) not in (len(lengths), lengths.sum()):
            raise TuneError(
                f"{source}: column {name} has {len(values):,} values for {len(lengths):,} samples with "
                f"{lengths.sum():,} tokens; it must have one value for each sample or for each token"
            )


def _nothing_left(accounting: Accounting) -> TuneError:
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
