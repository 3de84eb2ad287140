"""Tokenized samples, packed into training rows."""

import hashlib
import itertools
import operator
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tune.collators import IGNORE, Pixels, Sample
from tune.datasets.block import Example, RowBlock, TokenizedRow
from tune.datasets.fit import Fit
from tune.datasets.reasons import FULLY_MASKED
from tune.datasets.samples import Samples
from tune.errors import TuneError


class Dataset:
    """Tokenized samples, and the training rows made of them: one sample each, or packed.

    Neighboring samples with the same value in the column `group` (a pair, the answers to a prompt) share a row.

    - per row: `row_tokens` and `row_supervised` count tokens. `row_weights` sums the weights of the supervised tokens,
      1 each by default. `row_pairs` counts pairs: the first sample of a group with each of the others.
    - per sample: `lengths` and `supervised` count tokens. `digests` (uint64) are equal for equal tokens.
    - `validation`: the rows held out of the source.

    `dataset[index]` is one of `len(dataset)` rows: pass the dataset to torch.utils.data.DataLoader with
    `collate_fn=collate`, or `collate_inputs` for transformers models.
    """

    validation: "Dataset | None" = None

    def __init__(self, samples: Samples, pack_to: int | None = None, pictures: Pixels | None = None) -> None:
        """`pack_to` packs samples into rows of this many tokens; None: one sample a row. `pictures` makes pixels of
        the samples' pictures."""
        self._samples = samples
        self.pictures = pictures if samples.has_pictures else None
        self.lengths, self.supervised, self.digests = samples.lengths, samples.supervised, samples.digests
        self._order: np.ndarray | None = None  # None: rows are samples
        self._has_lists = bool(pack_to) or "group" in samples.columns
        if self._has_lists:
            self._make_rows(samples, pack_to)
        else:
            self.row_tokens, self.row_supervised, self.row_weights = samples.lengths, samples.supervised, samples.weight
            self.row_pairs = np.broadcast_to(np.int64(0), len(samples))
        self.accounting = samples.accounting.with_training_rows(len(self), pack_to)

    def _make_rows(self, samples: Samples, pack_to: int | None) -> None:
        """Make rows of whole groups of samples."""
        groups = samples.columns.get("group", np.arange(len(samples)))
        units = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))  # where each sample or group begins
        self._unit_starts = units
        order, row_starts = np.arange(len(units)), np.arange(len(units) + 1)
        if pack_to:
            lengths = np.add.reduceat(samples.lengths, units, dtype=np.int64)
            if (longest := int(lengths.max())) > pack_to:
                raise TuneError(
                    f"{samples.accounting.source}: a group of samples has {longest:,} tokens, more than "
                    f"max_seq_len={pack_to}. Set max_seq_len to {longest} or more, or packed=false"
                )
            order, row_starts = pack(lengths, pack_to)
        sizes = np.diff(units, append=len(samples))[order]
        before = np.concatenate([[0], np.cumsum(sizes)])
        self._order = np.repeat(units[order] - before[:-1], sizes) + np.arange(len(samples))
        self._row_starts = before[row_starts]
        self.row_pairs = np.diff(self._row_starts) - np.diff(row_starts)
        self.row_tokens = np.add.reduceat(samples.lengths[self._order], self._row_starts[:-1], dtype=np.int64)
        self.row_supervised = np.add.reduceat(samples.supervised[self._order], self._row_starts[:-1], dtype=np.int64)
        self.row_weights = np.add.reduceat(samples.weight[self._order], self._row_starts[:-1])

    @property
    def name(self) -> str:
        """The source of the rows."""
        return self.accounting.source

    @classmethod
    def from_samples(cls, samples: Iterable[Sample], max_seq_len: int, packed: bool = False) -> "Dataset":
        """Truncate samples to `max_seq_len`, drop samples without a supervised token, and count both.

        `packed` packs samples into rows of `max_seq_len` tokens. If one sample of a group is dropped, the whole group
        is. Raises TuneError if no sample is left.
        """
        given = list(samples)
        rows = []
        for _, unit in itertools.groupby(enumerate(given), lambda item: item[1].columns.get("group", -1 - item[0])):
            group = [sample for _, sample in unit]
            rows += _whole_group(group, max_seq_len)
        block = RowBlock.of(enumerate(rows))
        places = _GivenPlaces([sample.place for sample in given])
        fitted = Fit(max_seq_len, "truncate")(block, None, places)
        return cls(Samples.joined([fitted], "the dataset"), max_seq_len if packed else None)

    def __len__(self) -> int:
        return len(self.lengths) if self._order is None else len(self._row_starts) - 1

    def __getitem__(self, index: int) -> Sample | list[Sample]:
        """The sample of a row, or a list of samples if rows are packed or hold groups, for torch.utils.data.DataLoader.

        Raises IndexError if there is no such row.
        """
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"row {place} of a dataset of {len(self)}")
        documents = self.row(place % len(self))
        return documents if self._has_lists else documents[0]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The row numbers of an epoch in training order."""
        return permuted(len(self), seed, epoch)

    def row(self, index: int) -> list[Sample]:
        """The documents of one row."""
        if self._order is None:
            return [self._sample(index)]
        return [self._sample(sample) for sample in self._order[self._row_starts[index] : self._row_starts[index + 1]]]

    @property
    def parts(self) -> "dict[str, Dataset]":
        """The dataset itself, as the only part."""
        return {"": self}

    @property
    def samples(self) -> list[Sample]:
        """All samples in source order, as views."""
        return list(self)

    def __iter__(self) -> Iterator[Sample]:
        return map(self._sample, range(len(self._samples)))

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Column names with an example value each: an array if the column has a value per token."""
        columns = {}
        for name, value in self._samples.columns_of(0).items():
            columns[name] = np.asarray(value)[:1] if np.ndim(value) else np.asarray(value)
        return columns

    def add_column(self, name: str, values: np.ndarray) -> None:
        """Add a column with a value for each sample, or for each token."""
        self._samples = replace(self._samples, added={**self._samples.added, name: values})

    @property
    def copies(self) -> int:
        """The number of samples with the same tokens as an earlier one, without mismatched answers of labeled rows."""
        return self._samples.copies

    def learns_any(self, tokens: Sequence[int]) -> bool:
        """Whether any of these tokens is supervised anywhere."""
        return bool(np.isin(self._samples.learned_tokens, tokens).any())

    def require_vocabulary(self, size: int) -> None:
        """Raise TuneError if a token id is not below a model's vocabulary `size`."""
        if self._samples.largest_token >= size:
            raise TuneError(
                f"{self.accounting.source}: the tokenizer produced token {self._samples.largest_token}, but the "
                f"model's vocab_size is {size}. Use the tokenizer and the model of the same checkpoint"
            )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all tokens, labels and rows: equal for equal training data."""
        digest = hashlib.blake2b(self._samples.fingerprint.encode(), digest_size=16)
        samples = len(self.lengths)
        digest.update((np.arange(samples) if self._order is None else self._order).data)
        digest.update((np.arange(samples + 1) if self._order is None else self._row_starts).data)
        return digest.hexdigest()

    def _sample(self, index: int) -> Sample:
        sample = self._samples.sample(index)
        if "group" not in sample.columns:
            return sample
        number = int(np.searchsorted(self._unit_starts, index, side="right"))  # from 1: 0 is padding in a batch
        return replace(sample, columns={**sample.columns, "group": number})


@dataclass(frozen=True)
class _GivenPlaces:
    """The places of samples that are given and not read."""

    places: list[str]

    def of(self, number: int) -> str:
        return self.places[number]


def _whole_group(group: Sequence[Sample], max_len: int) -> list[TokenizedRow]:
    """A row for each sample. If one has no target in `max_len` tokens, the others are dropped."""
    rows = [TokenizedRow([Example(sample)]) for sample in group]
    is_masked = [
        bool((np.asarray(sample.labels[: max_len - (len(sample.labels) > max_len)]) == IGNORE).all())
        for sample in group
    ]
    if len(group) == 1 or not any(is_masked):
        return rows
    dropped = TokenizedRow(dropped=f"of a group with one that is {FULLY_MASKED}")
    return [row if masked else dropped for row, masked in zip(rows, is_masked, strict=True)]


def permuted(items: int | np.ndarray, *seeds: int) -> np.ndarray:
    """The `items` (or the integers below) in an order that depends on the seeds alone."""
    return np.random.Generator(np.random.PCG64([*seeds])).permutation(items)


def drawn_places(size: int, start: int, stop: int, *seeds: int) -> np.ndarray:
    """Positions [start, stop) of an endless sequence of permutations of the integers below `size`."""
    first = start // size
    passes = [permuted(size, *seeds, number) for number in range(first, -(-stop // size))]
    return np.concatenate([np.empty(0, np.int64), *passes])[start - first * size : stop - first * size]


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into rows of `capacity` tokens by best-fit decreasing over the whole set; deterministic.

    Returns `(order, starts)`, int64: row i holds the documents `order[starts[i]:starts[i + 1]]`, in ascending order,
    and rows are ordered by their first document. No length may exceed `capacity`.

    All documents of one length are placed together, in the rows with the least space that fits them. Best fit would put
    them in the same rows one by one.
    """
    decreasing = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    row_of = np.empty(len(lengths), dtype=np.int64)  # by rank in `decreasing`
    open_rows: dict[int, list[int]] = {}  # by the space left in them
    spaces: list[int] = []  # the keys of open_rows, sorted
    num_rows = placed = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect_left(spaces, length)
            space = spaces[at] if at < len(spaces) else capacity
            in_each = min(space // length, count)  # documents placed in each of `rows`
            if at < len(spaces):
                rows = open_rows[space][-(count // in_each) :]
                del open_rows[space][-len(rows) :]
                if not open_rows[space]:
                    del open_rows[space], spaces[at]
            else:
                rows = [*range(num_rows, num_rows + count // in_each)]
                num_rows += len(rows)
            row_of[placed : placed + len(rows) * in_each] = np.repeat(rows, in_each)
            placed += len(rows) * in_each
            count -= len(rows) * in_each
            left = space - in_each * length
            if left not in open_rows:
                open_rows[left] = []
                insort(spaces, left)
            open_rows[left] += rows

    rows_in_order = np.empty_like(row_of)
    rows_in_order[decreasing] = row_of
    firsts = np.unique(rows_in_order, return_index=True)[1]
    rows_in_order = np.argsort(np.argsort(firsts))[rows_in_order]
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows_in_order, minlength=num_rows))])
    return np.argsort(rows_in_order, kind="stable"), starts


def renumbered(sample: Sample, first: int) -> Sample:
    """A sample with its index and group shifted by `first`, the number of samples before its dataset."""
    columns = dict(sample.columns)
    if "group" in columns:
        columns["group"] += first
    return replace(sample, index=first + sample.index, columns=columns)
