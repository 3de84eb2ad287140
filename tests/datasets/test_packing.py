from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tune.datasets import pack

CASES = st.integers(1, 50).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)


def rows_of(lengths: list[int], capacity: int) -> list[list[int]]:
    order, starts = pack(np.array(lengths, dtype=np.int64), capacity)
    return [order[start:end].tolist() for start, end in pairwise(starts)]


@given(CASES)
def test_every_document_is_packed_once_and_no_row_is_too_long(case):
    lengths, capacity = case
    rows = rows_of(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= capacity for row in rows)
    assert rows == sorted(sorted(row) for row in rows)
    assert rows == rows_of(lengths, capacity)


@given(CASES)
def test_packing_matches_best_fit_decreasing(case):
    lengths, capacity = case
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - length)
    packed = [capacity - sum(lengths[index] for index in row) for row in rows_of(lengths, capacity)]
    assert sorted(packed) == sorted(spaces)


def first_fit(lengths: list[int], capacity: int) -> int:
    """The number of rows when each document goes into the first row that has room for it."""
    spaces: list[int] = []
    for length in lengths:
        at = next((index for index, space in enumerate(spaces) if space >= length), len(spaces))
        spaces[at:] = spaces[at:] or [capacity]
        spaces[at] -= length
    return len(spaces)


# With few documents, first fit can need fewer rows if their order is lucky; with many it does not.
@pytest.mark.parametrize("seed", range(10))
def test_chats_need_no_more_rows_than_with_first_fit(seed):
    lengths = np.clip(np.random.default_rng(seed).lognormal(5.5, 0.9, 1000), 1, 2048).astype(int).tolist()
    assert len(rows_of(lengths, 2048)) <= first_fit(lengths, 2048)


def test_chats_fill_their_rows():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 20_000), 8, 2048).astype(np.int64)
    _, starts = pack(lengths, 2048)
    assert lengths.sum() / (2048 * (len(starts) - 1)) >= 0.97
