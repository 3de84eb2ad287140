import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tune.datasets import pack


@given(st.integers(1, 50).flatmap(lambda capacity: st.tuples(st.lists(st.integers(1, capacity)), st.just(capacity))))
def test_every_document_once_and_no_row_too_long(case):
    lengths, capacity = case
    rows = pack(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= capacity for row in rows)
    assert rows == sorted(sorted(row) for row in rows)


@given(st.integers(1, 50).flatmap(lambda capacity: st.tuples(st.lists(st.integers(1, capacity)), st.just(capacity))))
def test_rows_are_those_of_best_fit_decreasing(case):
    lengths, capacity = case
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - length)
    packed = [capacity - sum(lengths[index] for index in row) for row in pack(lengths, capacity)]
    assert sorted(packed) == sorted(spaces)


def test_chats_fill_their_rows():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 20_000), 8, 2048).astype(int).tolist()
    rows = pack(lengths, 2048)
    assert sum(lengths) / (2048 * len(rows)) >= 0.97
