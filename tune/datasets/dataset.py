import hashlib
from array import array
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.accounting import FULLY_MASKED, Accounting
from tune.datasets.packing import pack
from tune.errors import TuneError


class Dataset:
    """Tokenised samples in memory (int32, flat), and the rows that training draws: one sample each, or packed.

    `row_tokens` and `row_supervised` count the tokens of each row.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        labels: np.ndarray,
        starts: np.ndarray,
        rows: tuple[np.ndarray, np.ndarray],
        accounting: Accounting,
    ) -> None:
        """Sample i is `tokens[starts[i]:starts[i + 1]]`, likewise its labels; `rows` are those of `pack`."""
        self.accounting = accounting
        self._tokens, self._labels, self._starts = tokens, labels, starts
        self._order, self._row_starts = rows
        supervised = np.add.reduceat(labels != IGNORE, starts[:-1], dtype=np.int64)
        self.row_tokens = np.add.reduceat(np.diff(starts)[self._order], self._row_starts[:-1])
        self.row_supervised = np.add.reduceat(supervised[self._order], self._row_starts[:-1])

    @classmethod
    def from_samples(
        cls, samples: Iterable[Sample], max_seq_len: int, packed: bool = False, accounting: Accounting | None = None
    ) -> "Dataset":
        """Truncates samples to `max_seq_len`, drops those without a supervised token, and counts both in `accounting`.

        `packed` fills rows of `max_seq_len` tokens with several samples. Raises TuneError if no sample is left.
        """
        accounting = accounting or Accounting()
        tokens, labels, starts = _flattened(samples, max_seq_len, accounting)
        lengths = np.diff(starts)
        rows = pack(lengths, max_seq_len) if packed else (np.arange(len(lengths)), np.arange(len(lengths) + 1))
        dataset = cls(tokens, labels, starts, rows, accounting)
        percentiles = np.percentile(lengths, [50, 90, 99, 100], method="higher")
        accounting.lengths = dict(zip(("p50", "p90", "p99", "max"), map(int, percentiles), strict=True))
        accounting.kept, accounting.tokens = len(lengths), len(tokens)
        accounting.supervised_tokens = int(dataset.row_supervised.sum())
        accounting.training_rows, accounting.row_capacity = len(dataset), max_seq_len if packed else None
        return dataset

    def __len__(self) -> int:
        return len(self.row_tokens)

    def row(self, index: int) -> list[Sample]:
        """The documents of one row."""
        return [self._sample(sample) for sample in self._order[self._row_starts[index] : self._row_starts[index + 1]]]

    @property
    def samples(self) -> list[Sample]:
        """All samples in the order of the source, as views."""
        return [self._sample(index) for index in range(self.accounting.kept)]

    def require_vocabulary(self, size: int) -> None:
        """Raises TuneError if a token is not one of a model's `size`."""
        if (largest := int(self._tokens.max())) >= size:
            raise TuneError(
                f"{self.accounting.source}: the tokenizer made token {largest}, but the model's vocab_size is {size}: "
                "take the tokenizer and the model from the same checkpoint"
            )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all tokens, labels and rows: equal for equal training data."""
        digest = hashlib.blake2b(digest_size=16)
        for values in (self._tokens, self._labels, self._starts, self._order, self._row_starts):
            digest.update(len(values).to_bytes(8, "little"))
            digest.update(values.data)
        return digest.hexdigest()

    def _sample(self, index: int) -> Sample:
        span = slice(self._starts[index], self._starts[index + 1])
        return Sample(self._tokens[span], self._labels[span], index)


def _flattened(
    samples: Iterable[Sample], max_seq_len: int, accounting: Accounting
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, labels, starts = array("i"), array("i"), array("q", [0])
    shortest_prompt = None
    for sample in samples:
        accounting.rows += 1
        kept = np.array(sample.labels[:max_seq_len], dtype=np.int32)
        if len(sample.tokens) > max_seq_len:
            accounting.truncated += 1
            kept[-1] = IGNORE  # its target was cut off
        if (kept == IGNORE).all():
            accounting.dropped[FULLY_MASKED] += 1
            supervised = np.flatnonzero(np.asarray(sample.labels) != IGNORE)
            if len(supervised):
                prompt = int(supervised[0]) + 1
                shortest_prompt = min(shortest_prompt or prompt, prompt)
            continue
        tokens.frombytes(np.asarray(sample.tokens[:max_seq_len], dtype=np.int32).tobytes())
        labels.frombytes(kept.tobytes())
        starts.append(len(tokens))
    if len(starts) == 1:
        raise _nothing_left(accounting, max_seq_len, shortest_prompt)
    return np.frombuffer(tokens, np.int32), np.frombuffer(labels, np.int32), np.frombuffer(starts, np.int64)


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
