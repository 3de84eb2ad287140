"""Statistics count the outcomes of rows and add up over chunks."""

import json

from tune.collators import Sample
from tune.datasets import load
from tune.datasets.accounting import Accounting
from tune.datasets.fit import CANNOT_BE_USED, FULLY_MASKED, Outcome
from tune.tokenizers import Tokenizer

SAMPLE = Sample([1, 2, 3], [2, 3, -100])
OUTCOMES = [
    Outcome([SAMPLE], remarks=["odd"]),
    Outcome([SAMPLE], cut=4, clipped=True, ends=False),
    Outcome([SAMPLE, SAMPLE], remarks=["odd"]),
    Outcome(dropped=FULLY_MASKED, place="data.jsonl:4", cut=5, needs=9),
    Outcome(dropped=FULLY_MASKED, place="data.jsonl:5", cut=1, needs=7),
    Outcome(dropped=CANNOT_BE_USED, place="data.jsonl:6", mistake="data.jsonl:6: wrong"),
]


def test_outcomes_are_counted():
    counted = Accounting.of_rows(OUTCOMES, "chat", ["id"])
    assert (counted.format, counted.ignored_columns) == ("chat", ["id"])
    assert (counted.rows, counted.kept, counted.dropped) == (6, 3, {FULLY_MASKED: 2, CANNOT_BE_USED: 1})
    assert (counted.truncated, counted.cut_tokens, counted.clipped) == (3, 10, 1)
    assert (counted.split, counted.endless, counted.shortest_prompt) == (1, 1, 7)
    assert (counted.remarks, counted.mistakes) == ({"odd": 2}, ["data.jsonl:6: wrong"])
    assert counted.first_dropped == {FULLY_MASKED: "data.jsonl:4", CANNOT_BE_USED: "data.jsonl:6"}


def test_chunks_add_up_to_the_whole():
    parts = [Accounting.of_rows([outcome], "chat", ["id"]) for outcome in OUTCOMES]
    assert sum(parts, Accounting()) == Accounting.of_rows(OUTCOMES, "chat", ["id"])
    assert parts[0] == Accounting.of_rows(OUTCOMES[:1], "chat", ["id"])  # the sum did not change it


def test_only_the_first_mistakes_are_kept():
    wrong = [Outcome(dropped=CANNOT_BE_USED, mistake=str(number)) for number in range(9)]
    assert (Accounting.of_rows(wrong[:4]) + Accounting.of_rows(wrong[4:])).mistakes == [*"01234"]


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
