"""Rows with better and worse answers or labeled answers: what is learned, cut, dropped and refused."""

import itertools
import json
import re

import numpy as np
import pytest
import torch

from tune.datasets import DataLoader, load
from tune.datasets.warnings import warnings_of
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def read(folder, tmp_path):
    tokenizer = Tokenizer(str(folder))

    def read(*rows, max_seq_len=400, kind="preferences", **options):
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load(tokenizer, str(file), max_seq_len=max_seq_len, kind=kind, **options)

    def learned(*rows, **options):
        """The text of each sample and its learned part."""
        samples = read(*rows, **options).samples
        ids = [
            (sample.tokens.tolist(), [label for label in sample.labels.tolist() if label >= 0]) for sample in samples
        ]
        return [(tokenizer.decode(tokens), tokenizer.decode(labels)) for tokens, labels in ids]

    read.learned = learned
    return read


ONE_TURN = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
CHAT = [(ONE_TURN.format("Yes"), "Yes<|im_end|>"), (ONE_TURN.format("No"), "No<|im_end|>")]
TEXT = [("<s>Q: 1+1? 2</s>", " 2</s>"), ("<s>Q: 1+1? 3</s>", " 3</s>")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q: 1+1?", "chosen": " 2", "rejected": " 3"}, TEXT),
        ({"chosen": "Q: 1+1? 2", "rejected": "Q: 1+1? 3"}, TEXT),
        ({"chosen": [user("Hi?"), reply("Yes")], "rejected": [user("Hi?"), reply("No")]}, CHAT),
        ({"prompt": "Hi?", "chosen": [user("Hi?"), reply("Yes")], "rejected": [user("Hi?"), reply("No")]}, CHAT),
        ({"prompt": "Hi?", "chosen": [reply("Yes")], "rejected": [reply("No")]}, CHAT),
        ({"prompt": [user("Hi?")], "chosen": [reply("Yes")], "rejected": [reply("No")]}, CHAT),
        ({"instruction": "Hi?", "chosen": "Yes", "rejected": "No"}, CHAT),
        (
            {"instruction": "Hi", "input": "?", "chosen": "Yes", "rejected": "No"},
            [(text.replace("Hi?", "Hi\n\n?"), answer) for text, answer in CHAT],
        ),
        ({"instruction": "Hi?", "chosen": "Yes", "rejected": ["No", "No"]}, [*CHAT, CHAT[1]]),
        ({"prompt": [user("Hi?")], "chosen": [reply("Yes")], "rejected": [[reply("No")]]}, CHAT),
        ({"prompt": [user("Hi?")], "chosen": reply("Yes"), "rejected": reply("No")}, CHAT),
    ],
)
def test_answers_to_one_prompt_form_a_group_with_only_answers_learned(read, row, expected):
    assert read.learned(row) == expected
    data = read(row, row)
    columns = [sample.columns for sample in data.samples]
    assert [row_columns["answer"] for row_columns in columns] == [*range(len(expected))] * 2
    assert [row_columns["group"] for row_columns in columns] == [1] * len(expected) + [2] * len(expected)
    assert data.row_pairs.tolist() == [len(expected) - 1] * 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q: 1+1?", "completion": " 2", "label": True},
        {"messages": [user("Hi?"), reply("Yes")], "label": 1},
        {"messages": [user("Hi"), reply("Ho"), user("Hi?"), reply("Yes")], "label": 1},
        {"instruction": "Hi?", "output": "Yes", "label": True},
    ],
)
def test_labeled_answers_come_with_a_mismatched_one(read, row):
    other = {"prompt": "Q: 2+2?", "completion": " 4", "label": False}
    rows = [row, other] if "prompt" in row else [row, {"messages": [user("b"), reply("No")], "label": False}]
    if "output" in row:
        rows[1] = {"instruction": "b", "output": "No", "label": False}
    data = read(*rows, kind="labelled")
    columns = [(sample.columns["label"], sample.columns["answer"], sample.columns["group"]) for sample in data.samples]
    assert columns == [(1, 0, 1), (1, 1, 1), (0, 0, 2), (0, 1, 2)]
    texts = read.learned(*rows, kind="labelled")
    ends = [learned for _, learned in texts]
    assert ends == (
        [" 2</s>", " 4</s>", " 4</s>", " 2</s>"]
        if "prompt" in row
        else [f"{answer}<|im_end|>" for answer in ("Yes", "No", "No", "Yes")]
    )
    prompts = [text.removesuffix("\n").removesuffix(learned) for text, learned in texts]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


def test_packed_rows_without_room_for_mismatched_answers(read):
    """The named length is the least one at which there is a pair."""
    rows = [{"prompt": f"question {name}", "completion": " yes", "label": True} for name in "ab"]
    longest = max(len(sample.tokens) for sample in read(*rows, kind="labelled"))
    with pytest.raises(TuneError, match="packed=false") as error:
        read(*rows, kind="labelled", max_seq_len=longest, packed=True)
    least = int(re.search(r"max_seq_len to (\d+)", str(error.value))[1])
    with pytest.raises(TuneError, match=f"max_seq_len to {least} or"):
        read(*rows, kind="labelled", max_seq_len=least - 1, packed=True)
    assert len(read(*rows, kind="labelled", max_seq_len=least, packed=True).samples) == 4
    assert len(read(*rows, kind="labelled", max_seq_len=longest).samples) == 4


@pytest.mark.parametrize(("most", "packed"), [*itertools.product(range(10, 40, 4), [False]), (40, True), (60, True)])
def test_labels_of_cut_answers_are_their_next_tokens(most, packed, read):
    """Also where a mismatched answer was itself cut before it is put after another prompt."""
    rows = [
        {"prompt": "p" * length, "completion": f" {length}" * (12 - length), "label": length % 2}
        for length in range(1, 8)
    ]
    data = read(*rows, kind="labelled", max_seq_len=most, packed=packed)
    samples = list(data)
    assert all(len(sample.tokens) <= most for sample in samples)
    assert most >= 30 or any(len(sample.tokens) == most for sample in samples)
    learned = 0
    for sample in samples:
        at = np.flatnonzero(sample.labels != -100)
        assert len(at) and at[-1] < len(sample.tokens) - 1
        assert (sample.labels[at] == sample.tokens[at + 1]).all()
        learned += len(at)
    assert learned == data.accounting.supervised_tokens == data.row_supervised.sum()


def test_pairs_of_two_files_are_two_groups(folder, tmp_path):
    (tmp_path / "pairs").mkdir()
    for name in "ab":
        row = {"prompt": f"{name}:", "chosen": " yes", "rejected": " no"}
        (tmp_path / "pairs" / f"{name}.jsonl").write_text(json.dumps(row))
    data = load(Tokenizer(str(folder)), str(tmp_path / "pairs"), max_seq_len=64, kind="preferences")
    assert [sample.columns["group"] for sample in data.samples] == [1, 1, 2, 2] and len(data) == 2


def test_pairs_as_labeled_answers_use_mismatches_from_other_prompts(read):
    rows = [{"prompt": f"{name}:", "chosen": f" {name}1", "rejected": f" {name}2"} for name in "ab"]
    data = read(*rows, kind="labelled")
    assert [sample.columns["label"] for sample in data.samples] == [1, 1, 0, 0] * 2
    texts = [text for text, _ in read.learned(*rows, kind="labelled")]
    assert [text[3:-4] for text in texts] == [
        "a: a1", "a: b1", "a: a2", "a: b1", "b: b1", "b: a1", "b: b2", "b: a1",
    ]  # fmt: skip
    assert data.copies == 0 and read(*rows, rows[0], kind="labelled").copies == 2
    labeled = [
        {"prompt": row["prompt"], "completion": row[answer], "label": answer == "chosen"}
        for row in rows
        for answer in ("chosen", "rejected")
    ]
    assert [text for text, _ in read.learned(*labeled, kind="labelled")] == texts
    with pytest.raises(TuneError, match="streaming"):
        read(*rows, kind="labelled", streaming=True)


def test_only_the_last_answer_is_compared_and_graded_rows_keep_margins(read):
    before = [user("a"), reply("b"), user("c")]
    row = {"chosen": [*before, reply("d")], "rejected": [*before, reply("e")], "margin": 0.5}
    assert [learned for _, learned in read.learned(row)] == ["d<|im_end|>", "e<|im_end|>"]
    assert [sample.columns["margin"] for sample in read(row, kind="graded").samples] == [0.5, 0.5]


def test_margin_is_an_ignored_column_unless_rows_are_graded(read):
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}
    rows = row, {**row, "prompt": "q"}
    for kind in ("preferences", "labelled"):
        assert read(*rows, kind=kind).accounting.ignored_columns == ["margin"]
    graded = read({**row, "margin": 0.5}, kind="graded")
    assert graded.accounting.ignored_columns == []


def test_long_pair_is_cut_at_the_longer_answer_first(read):
    row = {"prompt": "p", "chosen": " a" * 10, "rejected": " b" * 90}
    whole = [len(sample.tokens) for sample in read(row).samples]
    data = read(row, max_seq_len=whole[0] + 30)
    assert [len(sample.tokens) for sample in data.samples] == [whole[0], 30]
    assert (data.accounting.truncated, data.accounting.clipped, data.accounting.cut_tokens) == (1, 1, whole[1] - 30)
    assert data.accounting.split == 0
    dropped = read(row, {**row, "rejected": " b"}, max_seq_len=whole[0] + 30, too_long="drop").accounting
    assert dropped.dropped == {"longer than max_seq_len": 1}


def test_pairs_are_packed_and_batched_as_units(read):
    rows = [{"prompt": "p", "chosen": " a" * count, "rejected": " b" * 2} for count in range(1, 20)]
    data = read(*rows, max_seq_len=64, packed=True)

    class One:
        data_rank, data_size, device = 0, 1, torch.device("cpu")

    seen = []
    for _, batch in DataLoader(data, One(), 2, 1):
        assert batch.num_pairs == sum(int(part.columns["answer"].sum()) for part in batch.micro_batches)
        for micro_batch in batch.micro_batches:
            groups, answers = micro_batch.columns["group"], micro_batch.columns["answer"]
            seen += groups[answers == 1].tolist()
            assert groups[answers.nonzero() - 1].tolist() == groups[answers.nonzero()].tolist()
    assert sorted(seen) == list(range(1, 20))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "chosen equal to rejected"),
        ({"prompt": "p", "chosen": [reply("a")], "rejected": [reply("a")]}, "chosen equal to rejected"),
        ({"prompt": "p", "chosen": "a", "rejected": ""}, "empty rejected"),
        ({"prompt": "p", "chosen": None, "rejected": "a"}, "empty chosen"),
        ({"prompt": "p", "chosen": "a", "rejected": []}, "empty rejected"),
        ({"prompt": "p " * 150, "chosen": "a", "rejected": "b"}, "fully masked"),
        ({"prompt": "p", "chosen": "x" * 300 + "a", "rejected": "x" * 300 + "b"}, "chosen equal to rejected as far"),
    ],
)
def test_unusable_pairs_are_dropped_and_counted(read, row, reason):
    data = read(row, {"prompt": "p", "chosen": "a", "rejected": "b"}, max_seq_len=100)
    ((dropped, count),) = data.accounting.dropped.items()
    assert dropped.startswith(reason) and count == 1 and len(data) == 1


def test_answers_that_are_equal_once_cut_name_the_limit_that_they_share(read, folder):
    long = {"prompt": "p", "chosen": "x" * 300 + "a", "rejected": "x" * 300 + "b"}
    with pytest.raises(TuneError, match=r"equal to rejected .*max_seq_len=100 .*share max_seq_len.*raise it"):
        read(long, max_seq_len=100)
    data = read(long, {"prompt": "p", "chosen": "a", "rejected": "b"}, max_seq_len=100)
    (warning,) = [each for each in warnings_of(data, Tokenizer(str(folder))) if "equal to rejected" in each]
    assert "max_seq_len=100" in warning and "raise it" in warning and "dataset.filter" not in warning


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "chosen": "a", "rejected": "b"}, "columns={instruction: question}"),
        ({"chosen": "a", "rejected": "b"}, "no prompt: "),
        ({"chosen": [user("a")], "rejected": [user("b")]}, "must end with an assistant message"),
        ({"chosen": [user("a"), reply("b")], "rejected": [user("c"), reply("d")]}, "answer different prompts"),
        ({"prompt": "p", "chosen": "a", "rejected": [reply("b")]}, 'chosen is "a"'),
        ({"prompt": 1, "chosen": "a", "rejected": "b"}, "prompt is 1"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}, 'margin is "big"'),
        ({"prompt": "p", "completion": "b", "label": "good"}, 'label is "good"'),
        ({"instruction": 3, "chosen": "a", "rejected": "b"}, "instruction is 3"),
        ({"text": "a"}, "match no known format"),
        ({"messages": [user("a"), reply("b")]}, "match no known format"),
    ],
)
def test_invalid_rows_are_reported_with_their_location(read, row, message):
    with pytest.raises(TuneError, match=r"data.jsonl:1") as error:
        read(row, kind="labelled" if "label" in row else "graded" if "margin" in row else "preferences")
    assert message in str(error.value)


def test_options_that_split_answers_are_refused(read):
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    for options in ({"train_on": "all"}, {"too_long": "split"}):
        with pytest.raises(TuneError, match="preferences rows"):
            read(row, **options)
    with pytest.raises(TuneError, match="not a format of preferences rows"):
        read(row, format="chat")


def test_streams_draw_whole_pairs(read):
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}

    class One:
        data_rank, data_size, device = 0, 1, torch.device("cpu")

    (_, batch), *_ = DataLoader(read(*[row] * 8, streaming=True), One(), 4, 4, max_steps=2)
    assert batch.num_pairs == 4
    assert np.array_equal(batch.micro_batches[0].columns["answer"], [0, 1] * 4)
