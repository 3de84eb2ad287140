"""Mapping a function over many items in processes."""

import os
import signal
from itertools import count, islice

import pytest

from tune.datasets.workers import ALONE, CHUNK, map_chunks
from tune.errors import TuneError


def squares(chunk):
    return os.getpid(), [number * number for number in chunk]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("number", [0, 1, CHUNK, ALONE, ALONE + 1, 3000])
def test_results_come_in_order(workers, number):
    results = list(map_chunks(squares, range(number), workers))
    assert [square for _, result in results for square in result] == [index * index for index in range(number)]
    assert all(len(result) == CHUNK for _, result in results[:-1])
    processes = {process for process, _ in results}
    assert (processes == {os.getpid()}) == (workers == 1 or number <= ALONE) or not number


def test_items_are_not_read_far_ahead():
    taken = count()
    list(islice(map_chunks(squares, taken, 2), 40))
    assert next(taken) < (40 + 20) * CHUNK


@pytest.mark.parametrize("good", [10, 2000])
def test_error_while_reading_items_follows_earlier_results(good):
    def items():
        yield from range(good)
        raise TuneError("no more")

    seen = 0
    with pytest.raises(TuneError, match="no more"):
        for _, result in map_chunks(squares, items(), 2):
            seen += len(result)
    assert seen == good


def refuse_high(chunk):
    if chunk[-1] > 1900:
        raise TuneError(f"{chunk[-1]} is too high")
    return chunk


def test_error_of_the_function_in_a_process_is_raised():
    with pytest.raises(TuneError, match="is too high"):
        list(map_chunks(refuse_high, range(3000), 2))


def die_high(chunk):
    if chunk[-1] > 1900:
        os.kill(os.getpid(), signal.SIGKILL)
    return chunk


def test_killed_process_is_reported():
    with pytest.raises(TuneError, match=r"was killed, usually because .* memory\. Set dataset\.workers to less than 2"):
        list(map_chunks(die_high, range(3000), 2))
