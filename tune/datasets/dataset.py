"""Tokenised samples as the rows that training draws."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from tune.collators import Sample
from tune.datasets.accounting import Accounting
from tune.datasets.packing import pack
from tune.datasets.rows import fitted
from tune.datasets.samples import Samples, in_memory, part
from tune.errors import TuneError


class Dataset:
    """Tokenised samples, and the rows that training draws: one sample each, or packed.

    `row_tokens` and `row_supervised` count the tokens of each row; `validation` is what was held out of the source.
    """

    validation: "Dataset | None" = None

    def __init__(self, samples: Samples, accounting: Accounting, pack_to: int | None = None) -> None:
        """`pack_to` fills rows of so many tokens with several samples."""
        self.accounting = accounting
        self._samples = samples
        self._starts = np.concatenate([[0], np.cumsum(samples.lengths)])
        if pack_to:
            self._order, self._row_starts = pack(samples.lengths, pack_to)
        else:
            self._order, self._row_starts = np.arange(len(samples)), np.arange(len(samples) + 1)
        self.row_tokens = np.add.reduceat(samples.lengths[self._order], self._row_starts[:-1])
        self.row_supervised = np.add.reduceat(samples.supervised[self._order], self._row_starts[:-1])
        accounting.training_rows, accounting.row_capacity = len(self), pack_to

    @classmethod
    def from_samples(
        cls, samples: Iterable[Sample], max_seq_len: int, packed: bool = False, accounting: Accounting | None = None
    ) -> "Dataset":
        """Truncates samples to `max_seq_len`, drops those without a supervised token, and counts both in `accounting`.

        `packed` fills rows of `max_seq_len` tokens with several samples. Raises TuneError if no sample is left.
        """
        accounting = accounting or Accounting()
        flat = in_memory([part(fitted(sample, max_seq_len) for sample in samples)], max_seq_len, accounting)
        return cls(flat, accounting, max_seq_len if packed else None)

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The rows of an epoch in the order of training."""
        return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(self))

    def row(self, index: int) -> list[Sample]:
        """The documents of one row."""
        return [self._sample(sample) for sample in self._order[self._row_starts[index] : self._row_starts[index + 1]]]

    @property
    def samples(self) -> list[Sample]:
        """All samples in the order of the source, as views."""
        return list(self)

    def __iter__(self) -> Iterator[Sample]:
        return map(self._sample, range(len(self._samples)))

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sample."""
        return self._samples.lengths

    @property
    def supervised(self) -> np.ndarray:
        """The learned tokens of each sample."""
        return self._samples.supervised

    @property
    def digests(self) -> np.ndarray:
        """A number of each sample, uint64: samples of the same tokens have the same."""
        return self._samples.digests

    @property
    def copies(self) -> int:
        """Samples whose tokens are those of an earlier one."""
        return len(self.digests) - len(np.unique(self.digests))

    def learns_any(self, tokens: Sequence[int]) -> bool:
        """Whether one of these tokens is learned anywhere."""
        labels, block = self._samples.labels, 2**20
        return any(np.isin(labels[start : start + block], tokens).any() for start in range(0, len(labels), block))

    def require_vocabulary(self, size: int) -> None:
        """Raises TuneError if a token is not one of a model's `size`."""
        if self._samples.largest_token >= size:
            raise TuneError(
                f"{self.accounting.source}: the tokenizer made token {self._samples.largest_token}, but the model's "
                f"vocab_size is {size}: take the tokenizer and the model from the same checkpoint"
            )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all tokens, labels and rows: equal for equal training data."""
        digest = hashlib.blake2b(self._samples.fingerprint.encode(), digest_size=16)
        digest.update(self._order.data)
        digest.update(self._row_starts.data)
        return digest.hexdigest()

    def _sample(self, index: int) -> Sample:
        span = slice(self._starts[index], self._starts[index + 1])
        return Sample(self._samples.tokens[span], self._samples.labels[span], index)
