"""`exact_match` finds the answer of every row that `tune eval --data` reads."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from tune.errors import TuneError
from tune.evaluation import exact_match

ASKED, ANSWERED = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
ROWS = {
    "a text": {"prompt": "2 + 2 =", "answer": " 4\n"},
    "a number": {"prompt": "2 + 2 =", "answer": 4},
    "a completion": {"prompt": "2 + 2 =", "completion": "4"},
    "messages in a completion": {"prompt": [ASKED], "completion": [ANSWERED]},
    "an output": {"instruction": "2 + 2?", "output": "4"},
    "messages": {"messages": [ASKED, ANSWERED]},
    "messages of CSV": {"messages": '[{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]'},
    "parts": {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    "a prompt with its answer": {"prompt": [ASKED, ANSWERED]},
}


@pytest.mark.parametrize("name", ROWS)
def test_answer_of_every_format_is_found(name: str) -> None:
    assert exact_match(ROWS[name], "4 ") == 1
    assert exact_match(ROWS[name], "5") == 0


def test_zero_is_an_answer() -> None:
    assert exact_match({"prompt": "2 - 2 =", "answer": 0, "completion": "4"}, "0") == 1


@pytest.mark.parametrize("row", [{"prompt": "2 + 2 ="}, {"messages": [ANSWERED, ASKED]}, {"messages": [ASKED]}])
def test_row_without_an_answer_is_refused(row: dict) -> None:
    with pytest.raises(TuneError, match="exact_match"):
        exact_match(row, "2 + 2?")


@pytest.mark.parametrize("answer", [4.0, np.float64(4), Decimal("4.00")])
def test_whole_numbers_that_a_table_made_fractions_are_right(answer: Any) -> None:
    row = {"prompt": "2 + 2 =", "answer": answer}
    assert (exact_match(row, "4"), exact_match(row, str(answer)), exact_match(row, "40")) == (1, 1, 0)


def test_fractions_keep_their_digits() -> None:
    assert [exact_match({"answer": 4.5}, text) for text in ("4.5", "4")] == [1, 0]


def test_answer_that_a_table_lacks_is_no_answer() -> None:
    assert exact_match({"answer": math.nan, "output": "4"}, "4") == 1
    with pytest.raises(TuneError, match="exact_match"):
        exact_match({"answer": math.nan}, "nan")
