"""Tokenised samples by the million: flat arrays, in memory or mapped from files."""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.accounting import Accounting
from tune.datasets.rows import Outcome
from tune.errors import TuneError

NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Samples:
    """One behind the other (int32), sample i of `lengths[i]` tokens, `supervised[i]` of them learned.

    `digests` (uint64) are equal for equal tokens. A column has a value for each sample, or for each token. The samples
    of a chunk have no fingerprint.
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    digests: np.ndarray
    columns: dict[str, np.ndarray]
    fingerprint: str = ""  # equal for equal tokens, labels and columns
    largest_token: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def columns_of(self, index: int, tokens: slice) -> dict[str, Any]:
        """The columns of one sample, which lies at `tokens`."""
        return {name: values[index if len(values) == len(self) else tokens] for name, values in self.columns.items()}


Chunk = tuple[Samples, Accounting]
"""The samples of some rows, and what became of the rows."""


def chunk(outcomes: Iterable[Outcome]) -> Chunk:
    """The samples of some rows together."""
    accounting = Accounting()
    samples: list[Sample] = []
    for outcome in outcomes:
        accounting.count(outcome)
        samples += outcome.samples
    tokens = [np.asarray(sample.tokens, dtype=np.int32) for sample in samples]
    labels = [np.asarray(sample.labels, dtype=np.int32) for sample in samples]
    columns = defaultdict(list)
    for name, value in (item for sample in samples for item in sample.columns.items()):
        columns[name].append(np.asarray(value))
    together = Samples(
        np.concatenate([NONE, *tokens]),
        np.concatenate([NONE, *labels]),
        np.array([len(each) for each in labels], dtype=np.int64),
        np.array([np.count_nonzero(each != IGNORE) for each in labels], dtype=np.int64),
        np.frombuffer(b"".join(hashlib.blake2b(each.data, digest_size=8).digest() for each in tokens), dtype="<u8"),
        {name: np.concatenate(values) if values[0].ndim else np.stack(values) for name, values in columns.items()},
    )
    return together, accounting


def in_memory(chunks: Iterable[Chunk], accounting: Accounting) -> Samples:
    """All chunks together, counted in `accounting`. Raises TuneError if no sample is left."""
    tokens, labels = io.BytesIO(), io.BytesIO()
    others = write(chunks, accounting, tokens, labels)
    tokens_array, labels_array = (np.frombuffer(file.getbuffer(), dtype=np.int32) for file in (tokens, labels))
    return Samples(tokens=tokens_array, labels=labels_array, **others)


def write(chunks: Iterable[Chunk], accounting: Accounting, tokens: BinaryIO, labels: BinaryIO) -> dict[str, Any]:
    """Writes the chunks' tokens and labels; returns the other fields of their `Samples`, counts in `accounting`."""
    arrays: dict[str, list[np.ndarray]] = defaultdict(list)
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    largest = 0
    digests = [hashlib.blake2b(digest_size=16) for _ in range(3)]
    for samples, became in chunks:
        accounting.add(became)
        if not len(samples):
            continue
        tokens.write(samples.tokens.data)
        labels.write(samples.labels.data)
        for digest, values in zip(digests, (samples.tokens, samples.labels, samples.lengths), strict=True):
            digest.update(values.data)
        for name in ("lengths", "supervised", "digests"):
            arrays[name].append(getattr(samples, name))
        for name, values in samples.columns.items():
            columns[name].append(values)
        largest = max(largest, int(samples.tokens.max()))
    if not arrays:
        raise _nothing_left(accounting)
    whole, whole_columns = ({name: np.concatenate(each) for name, each in of.items()} for of in (arrays, columns))
    lengths = whole["lengths"]
    for name, values in whole_columns.items():
        if len(values) not in (len(lengths), lengths.sum()):
            raise TuneError(
                f"{accounting.source}: column {name} has {len(values):,} values for {len(lengths):,} samples of "
                f"{lengths.sum():,} tokens; each sample must have one, or each token"
            )
    digests += [hashlib.blake2b(values.data, digest_size=16) for values in whole_columns.values()]
    fingerprint = hashlib.blake2b(b"".join(digest.digest() for digest in digests), digest_size=16).hexdigest()
    percentiles = np.percentile(lengths, [50, 90, 99, 100], method="higher")
    accounting.lengths = dict(zip(("p50", "p90", "p99", "max"), map(int, percentiles), strict=True))
    accounting.samples, accounting.tokens = len(lengths), int(lengths.sum())
    accounting.supervised_tokens = int(whole["supervised"].sum())
    return {**whole, "columns": whole_columns, "fingerprint": fingerprint, "largest_token": largest}


def _nothing_left(accounting: Accounting) -> TuneError:
    if accounting.rows == 0:
        return TuneError(f"{accounting.source} has no rows")
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in accounting.dropped.most_common())
    message = f"{accounting.source}: none of the {accounting.rows:,} rows can be learned from: {reasons}"
    if shortest := accounting.shortest_prompt:
        message += f". max_seq_len cuts off every answer: the shortest prompt has {shortest} tokens. "
        message += "Set max_seq_len to more than that"
    return TuneError(message)
