"""Statistics count the outcomes of rows and add up over chunks."""

import json

from tune.collators import Sample
from tune.datasets import load
from tune.datasets.accounting import Accounting
from tune.datasets.block import ENDS, Example, RowBlock, TokenizedRow
from tune.datasets.fit import Fit
from tune.datasets.reasons import CANNOT_BE_USED, FULLY_MASKED
from tune.tokenizers import Tokenizer


class Places:
    def of(self, number):
        return f"data.jsonl:{number}"


def sample(first, learned, last=0):
    """Return a sample whose first target is at `first`, with `learned` targets and then `last` others."""
    return Sample([1] * (first + learned + last), [-100] * first + [2] * learned + [-100] * last)


# In 4 tokens; the third row is split, the first target of the fourth and fifth is cut off.
ROWS = [
    TokenizedRow([Example(sample(1, 2, 1), remarks=["odd"])]),
    TokenizedRow([Example(sample(1, 7), flags=0)]),
    TokenizedRow([Example(sample(1, 2, 1), flags=0, remarks=["odd", "even"])]),
    TokenizedRow([Example(sample(7, 2))]),
    TokenizedRow([Example(sample(5, 2))]),
    TokenizedRow(dropped=CANNOT_BE_USED, mistake="wrong"),
]


def counted(rows, first=1):
    block = RowBlock.of(enumerate(rows, first))
    return Fit(4, "truncate")(block, None, Places()).accounting


def test_outcomes_are_counted():
    found = counted(ROWS)
    assert (found.rows, found.kept, found.dropped) == (6, 3, {FULLY_MASKED: 2, CANNOT_BE_USED: 1})
    assert (found.truncated, found.cut_tokens, found.clipped) == (3, 4 + 5 + 3, 1)
    assert (found.split, found.endless, found.shortest_prompt) == (0, 1, 7)
    assert (found.remarks, found.mistakes) == ({"odd": 2, "even": 1}, ["data.jsonl:6: wrong"])
    assert found.first_dropped == {FULLY_MASKED: "data.jsonl:4", CANNOT_BE_USED: "data.jsonl:6"}


def test_split_rows_are_counted():
    block = RowBlock.of([(1, TokenizedRow([Example(sample(0, 9), ENDS)])), (2, TokenizedRow([Example(sample(0, 4))]))])
    assert Fit(4, "split")(block, None, Places()).accounting.split == 1


def test_blocks_add_up_to_the_whole():
    parts = [counted([row], number) for number, row in enumerate(ROWS, 1)]
    assert sum(parts, Accounting()) == counted(ROWS)
    assert parts[0] == counted(ROWS[:1])  # the sum did not change it


def test_only_the_first_mistakes_are_kept():
    wrong = [TokenizedRow(dropped=CANNOT_BE_USED, mistake="wrong") for _ in range(9)]
    assert (counted(wrong[:4]) + counted(wrong[4:], 5)).mistakes == [
        f"data.jsonl:{number}: wrong" for number in range(1, 6)
    ]


def test_table_names_the_first_row_dropped_for_each_reason(folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    texts = ["", *(f"row {number}" for number in range(40)), ""]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = load(Tokenizer(str(folder)), str(file), max_seq_len=32, validation_fraction=0.3, workers=1)
    accounting = data.accounting
    (empty,) = accounting.first_dropped  # held-out rows are not dropped
    assert accounting.first_dropped[empty] == "rows.jsonl:1" and accounting.dropped[empty] >= 1
    assert f"{empty}" in accounting.table() and "(first: rows.jsonl:1)" in accounting.table()


def test_stream_knows_its_format_and_ignored_columns(folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {number}", "id": number}) + "\n" for number in range(70)))
    stream = load(Tokenizer(str(folder)), str(file), max_seq_len=32, streaming=True, shuffle_buffer=64, workers=1)
    assert (stream.accounting.format, stream.accounting.ignored_columns) == ("text", ["id"])
    assert stream.accounting.rows == 64
