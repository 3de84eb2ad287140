"""Advice for unknown column names works when followed; columns with a meaning beyond text are refused."""

import csv
import json
import re
import shlex

import pytest
from omegaconf import OmegaConf
from row_outcomes import outcomes

from tune import config
from tune.config import text
from tune.datasets import load
from tune.datasets.parse.columns import MEANINGS
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
CHAT = {"messages": TURNS}


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def read(folder, tmp_path):
    tokenizer = Tokenizer(str(folder))

    def read(*rows, **options):
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load(tokenizer, str(file), max_seq_len=200, **options)

    def text(row, **options):
        (sample,) = read(row, **options).samples
        return tokenizer.decode(sample.tokens.tolist())

    read.text = text
    return read


def settings_of(advice: str) -> dict:
    """Parse one alternative of an error's advice into dataset settings, as the command line does."""
    overrides = [word for word in shlex.split(advice) if word.startswith("dataset.")]
    dataset = config.load("full_finetune", ["model.path=m", "dataset.path=d", *overrides]).dataset
    return {name: value for name, value in OmegaConf.to_container(dataset).items() if f"dataset.{name}=" in advice}


TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"question": "2+2?", "answer": "4"}, [TURN.format("2+2?", "4"), "<s>2+2?4</s>"]),
        ({"Question": "2+2?", "Answer (EN)": "", "Answer": "4"}, [TURN.format("2+2?", "4"), "<s>2+2?4</s>"]),
        ({"instruction": "Add.", "context": "2", "response": "4"}, [TURN.format("Add.\n\n2", "4"), "<s>Add.4</s>"]),
        (
            {"system_prompt": "S", "question": "a", "response": "b"},
            ["<|im_start|>system\nS<|im_end|>\n" + TURN.format("a", "b"), "<s>ab</s>"],
        ),
        ({"input": "a", "output": "b"}, [TURN.format("a", "b"), "<s>ab</s>"]),
        ({"id": 1, "dialog": TURNS}, [TURN.format("Hi", "Yo")]),
        ({"content": "Once", "title": "T"}, ["<s>Once</s>"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, [TURN.format("a", "b"), "<s>ab</s>"]),
        ({"prompt": "Hi", "chosen": TURNS, "rejected": TURNS[:1]}, [TURN.format("Hi", "Yo")]),
        ({"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]}, [TURN.format("Hi", "Yo")]),
    ],
)
def test_advice_fits_the_row_and_works(read, row, texts):
    with pytest.raises(TuneError, match="match no known format") as error:
        read(row)
    assert ("preference_finetune and reward_finetune train on pairs" in str(error.value)) == ("rejected" in row)
    ways = str(error.value).split("Set ")[1].split(", or ")
    assert [read.text(row, **settings_of(way)) for way in ways] == texts


def test_example_for_unknown_names_has_the_columns_of_the_row(read):
    row = {"ticket_text": "It hums.", "fault": "fan"}
    with pytest.raises(
        TuneError, match=r"ticket_text, fault, urgency.*'dataset\.columns=\{instruction: COLUMN, output: COL"
    ):
        read(row | {"urgency": "low"})  # any two of them
    with pytest.raises(TuneError, match="match no known format") as error:
        read(row)
    setting = re.search(r"'(dataset\.columns=.*?)'", str(error.value))[0]
    assert read.text(row, **settings_of(setting)) == TURN.format("It hums.", "fan")
    assert "my_data.py, in the current folder" in str(error.value)
    with pytest.raises(TuneError, match=r"'dataset\.columns=\{text: saying\}'"):
        read({"saying": "Once"})


def test_conversation_instead_of_pairs_is_refused(read):
    with pytest.raises(TuneError, match="messages is a conversation, not a pair of answers: use full_finetune"):
        read(CHAT, kind="preferences")


def test_labeled_answer_instead_of_pairs_gets_advice(read):
    row = {"prompt": "Hi", "completion": "Yo", "label": True}
    with pytest.raises(TuneError, match=r"loss._component_=tune.losses.KTO dataset.kind=labelled"):
        read(row, kind="preferences")
    assert read(row, {**row, "prompt": "Ho"}, kind="labelled")


def test_advice_for_an_explicit_format(read):
    row = {"question": "a", "answer": "b"}
    with pytest.raises(TuneError, match="format=alpaca needs the columns instruction and output; the row has") as error:
        read(row, format="alpaca")
    assert read.text(row, format="alpaca", **settings_of(str(error.value))) == TURN.format("a", "b")
    with pytest.raises(TuneError, match="needs the columns prompt and answer") as error:
        read(row, columns={"completion": "answer"})
    assert read.text(row, **settings_of(str(error.value))) == "<s>ab</s>"


def test_semicolon_spreadsheets(folder, tmp_path):
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([["question", "answer"], ["1,5 + 1?", "2,5; I think"]])
    with pytest.raises(TuneError, match="the columns question, answer match no") as error:
        load(Tokenizer(str(folder)), str(tmp_path / "data.csv"), max_seq_len=200)
    advice = settings_of(re.split("Set |, or ", str(error.value))[1])
    data = load(Tokenizer(str(folder)), str(tmp_path / "data.csv"), max_seq_len=200, **advice)
    assert data.accounting.kept == 1


def test_columns_without_a_blank_after_the_colon(read):
    _, columns = text.parse("{prompt:question,completion:answer}")  # as written on the command line
    with pytest.raises(TuneError, match=re.escape("'{prompt: question}'")) as error:
        read({"question": "a", "answer": "b"}, columns=columns)
    assert "Did you mean" not in str(error.value)


def test_rows_of_another_format_after_the_first(read, tokenizer, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(TuneError, match=r"data.jsonl:2: no column text, .* prompt, completion\. .*dataset\.format"):
        load(tokenizer, str(tmp_path / "data.jsonl"), max_seq_len=100)


# columns with another meaning


SEEN = [{"role": "user", "content": "<image>\nWhat is it?"}, {"role": "assistant", "content": "A cat."}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"instruction": "a", "output": "b", "chosen": "b", "rejected": "c"},
            "chosen and rejected in addition to instruction",
        ),
        (
            {**CHAT, "chosen": TURNS, "rejected": TURNS},
            "chosen and rejected in addition to messages: which of two answers",
        ),
        ({"text": "A film.", "label": 0}, "label in addition to text: whether the answer is good, or the class"),
        ({"prompt": "a", "completion": "b", "label": False}, "label in addition to prompt and completion"),
        ({**CHAT, "images": ["cat.jpg"]}, "images in addition to messages: images, video or audio"),
        ({"conversations": TURNS, "image": "cat.jpg"}, "image in addition to conversations"),
        ({"messages": SEEN}, "<image> in addition to messages: the place of an image"),
        ({"messages": SEEN, "images": ["cat.jpg"]}, "images and <image> in addition to messages: images"),
        ({"prompt": "<image> is", "completion": "a cat"}, "<image> in addition to prompt"),
        ({"text": "two", "audio": {"bytes": "a"}}, "audio in addition to text"),
    ],
)
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_columns_with_unread_meaning_stop_the_run(read, row, message, on_bad_row):
    harmless = json.loads(json.dumps(row).replace("<image>", ""))
    harmless |= {name: [] if name == "images" else None for name in MEANINGS if name in row}
    with pytest.raises(TuneError, match=rf"^data\.jsonl:2: the row has {re.escape(message)}") as error:
        read(harmless, row, on_bad_row=on_bad_row)
    assert read(row, **settings_of(re.search(r"set ('.*?')", str(error.value))[1])).accounting.kept == 1


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*TURNS[:1], {"role": "assistant", "content": "<image> is a tag of RSS"}]},
        {"text": "<rss><image><url>a</url></image></rss>"},
        {**CHAT, "source": "web", "score": 3, "labels": ["a"], "images": [], "chosen": None},
        {"input_ids": [72, 73], "labels": [72, 73]},
    ],
)
def test_harmless_columns_are_accepted(read, row):
    assert read(row).accounting.kept == 1


def test_mapped_columns_are_read_whatever_their_names(read):
    row = {"sentence": "A film.", "label": "good"}
    assert read.text(row, columns={"prompt": "sentence", "completion": "label"}) == "<s>A film.good</s>"
    with pytest.raises(TuneError, match="the row has label in addition to text"):
        read(row, columns={"text": "sentence"})
    assert read.text(row, columns={"text": "sentence"}, ignore=["label"]) == "<s>A film.</s>"


# rows that cannot be used


def test_bad_rows_are_skipped_counted_and_shown(folder, tmp_path):
    file = tmp_path / "data.jsonl"
    good, half, strange = json.dumps(CHAT), json.dumps(CHAT)[:-4], json.dumps({"messages": [{"role": "usr"}]})
    others = [json.dumps({**CHAT, "id": number}) for number in range(95)]
    file.write_text("\n".join([good, half, good, strange, "\udcff", *others, half]), errors="surrogateescape")
    tokenizer = Tokenizer(str(folder))
    with pytest.raises(TuneError, match=r"(?s)jsonl:2, 101: malformed.*jsonl:4: messages.*jsonl:5: not UTF-8"):
        load(tokenizer, str(file), max_seq_len=200)
    for options in (
        {},
        {},
        {"streaming": True},
        {"workers": 2, "validation_fraction": 0.5},
    ):  # the second reads the cache
        data = load(tokenizer, str(file), max_seq_len=200, on_bad_row="skip", **options)
        accounting = data.accounting
        assert accounting.dropped["cannot be used"] >= 3 and accounting.rows == 101
        assert accounting.rows == accounting.kept + accounting.dropped.total()
        assert re.match(r"data\.jsonl:2: malformed JSON", accounting.mistakes[0])
        assert (
            re.search(r"dropped: cannot be used +4\n +such as +data\.jsonl:2: malformed", accounting.table()) or options
        )
    with pytest.raises(TuneError, match=r"(?s)4 of 101 rows cannot be used.*share=0\.03.*\n  data\.jsonl:4: "):
        load(tokenizer, str(file), max_seq_len=200, on_bad_row="skip", max_bad_share=0.03)


@pytest.mark.slow
def test_max_bad_share_counts_all_rows_and_fails_early(folder, tmp_path):
    tokenizer = Tokenizer(str(folder))

    def read(*lines, streaming=False):
        (tmp_path / "data.jsonl").write_text("\n".join(lines))
        return load(tokenizer, str(tmp_path / "data.jsonl"), max_seq_len=200, on_bad_row="skip", workers=1,
                    max_bad_share=0.1, streaming=streaming, shuffle_buffer=64 if streaming else None)  # fmt: skip

    good, bad = '{"text": "a"}', "{"
    shown = read(*[good], *[bad] * 20, *[good] * 180).accounting.mistakes
    assert [mistake.split(": ")[0] for mistake in shown] == [f"data.jsonl:{line}" for line in range(2, 7)]
    with pytest.raises(TuneError, match="21 of 201 rows cannot be used"):
        read(*[good], *[bad] * 21, *[good] * 179)
    with pytest.raises(TuneError, match=r"200 of the first 1,0\d\d rows cannot be used"):
        read(*[good] * 824, *[bad] * 200, *[good] * 5000)
    stream = read(*[good] * 824, *[bad] * 200, *[good] * 5000, streaming=True)
    with pytest.raises(TuneError, match=r"200 of the first 1,0\d\d rows cannot be used"):
        list(stream.windows())


PACKED_ROW = {"input_ids": [10, 11, 12, 13, 20, 21]}
PACKED_BY = {
    "position_ids": [[0, 1, 2, 3, 0, 1], [5, 6, 7, 8, 9, 10], [[0, 1, 2, 3, 0, 1]]],
    "seq_lengths": [[4, 2], [3, 3]],
    "cu_seqlens": [[0, 4, 6], [0, 4]],
    "seq_idx": [[0, 0, 0, 0, 1, 1]],
    "document_ids": [[7, 7, 7, 7, 8, 8]],
}


@pytest.mark.parametrize(("column", "values"), [(name, value) for name, all in PACKED_BY.items() for value in all])
def test_rows_that_another_program_packed_are_refused(tokenizer, column, values):
    with pytest.raises(TuneError, match=rf"^row: .*{column}.* packed=true"):
        outcomes(tokenizer, 32, [("row", {**PACKED_ROW, column: values})])
    (outcome,) = outcomes(tokenizer, 32, [("row", {**PACKED_ROW, column: values})], ignore=[column])
    assert len(outcome.samples[0].tokens) == 6


@pytest.mark.parametrize(
    "columns",
    [
        {"position_ids": [0, 1, 2, 3, 4, 5], "seq_lengths": [6], "cu_seqlens": [0, 6], "seq_idx": [0] * 6},
        {"position_ids": [1, 1, 0, 1, 2, 3], "attention_mask": [0, 0, 1, 1, 1, 1], "seq_lengths": [4]},
        {"position_ids": None, "seq_lengths": [], "document_ids": "a/b.txt"},
    ],
)
def test_columns_that_describe_one_document_are_accepted(tokenizer, columns):
    (outcome,) = outcomes(tokenizer, 32, [("row", {**PACKED_ROW, **columns})])
    assert outcome.samples


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("enable_thinking", False),
        ("chat_template", "{{ messages }}"),
        ("kto_tag", False),
        ("rejected_response", "no"),
    ],
)
def test_columns_that_other_trainers_read_are_refused(tokenizer, column, value):
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    with pytest.raises(TuneError, match=rf"^row: .*{column}"):
        outcomes(tokenizer, 64, [("row", {**row, column: value})])
    for empty in (None, "", {}):
        assert outcomes(tokenizer, 64, [("row", {**row, column: empty})])[0].samples
