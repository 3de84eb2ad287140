"""Tokenised samples by the million: flat arrays, in memory or mapped from files."""

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from tune.collators import IGNORE
from tune.datasets.accounting import Accounting
from tune.datasets.rows import Outcome
from tune.errors import TuneError

MISTAKES_SHOWN = 5


@dataclass(eq=False)
class Chunk:
    """The samples of some rows, flat (int32), and what became of the rows.

    `lengths` and `supervised` count the tokens of each sample; `digests` (uint64) are equal for equal tokens.
    `columns` are those of the samples, behind each other. `mistakes` says which rows cannot be used, and why.
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    digests: np.ndarray
    columns: dict[str, np.ndarray]
    accounting: Accounting
    shortest_prompt: int | None = None  # of the rows whose answer was cut off
    mistakes: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Samples:
    """One behind the other, sample i of `lengths[i]` tokens, `supervised[i]` of them learned, with `digests[i]`.

    `columns` have a value for each sample, or where their name is in `per_token` for each token.
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    digests: np.ndarray
    columns: dict[str, np.ndarray]
    per_token: list[str]
    fingerprint: str  # equal for equal tokens, labels and columns
    largest_token: int

    def __len__(self) -> int:
        return len(self.lengths)

    def columns_of(self, index: int, tokens: slice) -> dict[str, Any]:
        """The columns of one sample, which lies at `tokens`."""
        return {
            name: values[tokens] if name in self.per_token else values[index] for name, values in self.columns.items()
        }


def chunk(outcomes: Iterable[Outcome]) -> Chunk:
    """The samples of some rows together."""
    accounting = Accounting()
    tokens, labels = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.int32)]
    columns: dict[str, list[np.ndarray]] = {}
    prompts: list[int] = []
    mistakes: list[str] = []
    for outcome in outcomes:
        if outcome.mistake is not None and outcome.dropped is None:
            mistakes.append(outcome.mistake)
            continue
        accounting.count(outcome)
        prompts += [outcome.needs] if outcome.needs else []
        tokens += [np.asarray(sample.tokens, dtype=np.int32) for sample in outcome.samples]
        labels += [np.asarray(sample.labels, dtype=np.int32) for sample in outcome.samples]
        for name, value in (item for sample in outcome.samples for item in sample.columns.items()):
            columns.setdefault(name, []).append(np.asarray(value))
    return Chunk(
        np.concatenate(tokens),
        np.concatenate(labels),
        np.array([len(each) for each in labels[1:]], dtype=np.int64),
        np.array([np.count_nonzero(each != IGNORE) for each in labels[1:]], dtype=np.int64),
        np.array([_digest(each) for each in tokens[1:]], dtype=np.uint64),
        {name: np.concatenate(values) if values[0].ndim else np.stack(values) for name, values in columns.items()},
        accounting,
        min(prompts, default=None),
        mistakes,
    )


def in_memory(chunks: Iterable[Chunk], max_seq_len: int, accounting: Accounting) -> Samples:
    """All chunks together, counted in `accounting`. Raises TuneError for mistakes, or if no sample is left."""
    tokens, labels = io.BytesIO(), io.BytesIO()
    others = write(chunks, max_seq_len, accounting, tokens, labels)
    tokens_array, labels_array = (np.frombuffer(file.getbuffer(), dtype=np.int32) for file in (tokens, labels))
    return Samples(tokens=tokens_array, labels=labels_array, **others)


def write(
    chunks: Iterable[Chunk], max_seq_len: int, accounting: Accounting, tokens: BinaryIO, labels: BinaryIO
) -> dict[str, Any]:
    """Writes the chunks' tokens and labels; returns the other fields of their `Samples`, counts in `accounting`."""
    lengths: list[np.ndarray] = []
    supervised: list[np.ndarray] = []
    equal: list[np.ndarray] = []
    columns: dict[str, list[np.ndarray]] = {}
    prompts: list[int] = []
    mistakes: list[str] = []
    largest = 0
    digests = [hashlib.blake2b(digest_size=16) for _ in range(3)]
    for chunk in chunks:
        mistakes += chunk.mistakes
        if len(mistakes) >= MISTAKES_SHOWN:
            break
        accounting.add(chunk.accounting)
        prompts += [chunk.shortest_prompt] if chunk.shortest_prompt else []
        if not len(chunk.lengths):
            continue
        tokens.write(chunk.tokens.data)
        labels.write(chunk.labels.data)
        for digest, values in zip(digests, (chunk.tokens, chunk.labels, chunk.lengths), strict=True):
            digest.update(values.data)
        lengths.append(chunk.lengths)
        supervised.append(chunk.supervised)
        equal.append(chunk.digests)
        for name, values in chunk.columns.items():
            columns.setdefault(name, []).append(values)
        largest = max(largest, int(chunk.tokens.max()))
    if mistakes:
        first = f"the first {MISTAKES_SHOWN} rows" if len(mistakes) >= MISTAKES_SHOWN else "rows"
        listing = mistakes[:MISTAKES_SHOWN]
        raise TuneError("\n  ".join([f"{accounting.source}: {first} that cannot be used:", *listing]))
    if not lengths:
        raise _nothing_left(accounting, max_seq_len, min(prompts, default=None))
    all_columns = {name: np.concatenate(values) for name, values in columns.items()}
    digests += [hashlib.blake2b(values.data, digest_size=16) for values in all_columns.values()]
    fingerprint = hashlib.blake2b(b"".join(digest.digest() for digest in digests), digest_size=16).hexdigest()
    all_lengths, all_supervised = np.concatenate(lengths), np.concatenate(supervised)
    _require_every_sample_has(all_columns, all_lengths, accounting.source)
    percentiles = np.percentile(all_lengths, [50, 90, 99, 100], method="higher")
    accounting.lengths = dict(zip(("p50", "p90", "p99", "max"), map(int, percentiles), strict=True))
    accounting.samples, accounting.tokens = len(all_lengths), int(all_lengths.sum())
    accounting.supervised_tokens = int(all_supervised.sum())
    return {
        "lengths": all_lengths,
        "supervised": all_supervised,
        "digests": np.concatenate(equal),
        "columns": all_columns,
        "per_token": [name for name, values in all_columns.items() if len(values) != len(all_lengths)],
        "fingerprint": fingerprint,
        "largest_token": largest,
    }


def _require_every_sample_has(columns: dict[str, np.ndarray], lengths: np.ndarray, source: str) -> None:
    for name, values in columns.items():
        if len(values) not in (len(lengths), lengths.sum()):
            raise TuneError(
                f"{source}: column {name} has {len(values):,} values for {len(lengths):,} samples of {lengths.sum():,} "
                "tokens; each sample must have one, or each token"
            )


def _digest(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")


def _nothing_left(accounting: Accounting, max_seq_len: int, shortest_prompt: int | None) -> TuneError:
    if accounting.rows == 0:
        return TuneError(f"{accounting.source} has no rows")
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in accounting.dropped.most_common())
    message = f"{accounting.source}: none of the {accounting.rows:,} rows can be learned from: {reasons}"
    if shortest_prompt is not None:
        message += (
            f". max_seq_len={max_seq_len} cuts off every answer: the shortest prompt has {shortest_prompt} tokens. "
            "Set max_seq_len to more than that"
        )
    return TuneError(message)
