"""Data that can be trained on, but seldom are meant so: from which share on it is said, and with which setting."""

import json
import re
import shlex

import pytest

from tune.datasets import load, mix
from tune.datasets.display import parts_of
from tune.datasets.warnings import warnings_about, warnings_of
from tune.tokenizers import Tokenizer


def chat(question, answer, **columns):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **columns}


def good(number):
    """So many rows, no two of them equal."""
    return [chat(f"What is {index}?", f"It is {index + 1}.") for index in range(number)]


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def warned(tokenizer, tmp_path):
    def warned(rows, max_seq_len=100, **options):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return warnings_of(load(tokenizer, str(file), max_seq_len=max_seq_len, workers=1, **options), tokenizer)

    return warned


@pytest.mark.parametrize(
    ("bad", "options", "warning"),
    [
        (chat("a", ""), {}, r"{} are dropped, empty answer: .*dataset\.filter$"),
        (chat("a", "b") | {"messages": [{"role": "user", "content": "a"}]}, {}, r".*no assistant message: .*train_on$"),
        ({"messages": []}, {}, r"{} are dropped, empty messages: .*dataset\.filter"),
        (chat("a", "b" * 90), {"too_long": "drop"}, r"{} are dropped, longer than max_seq_len: raise max_seq_len, or"),
        (chat("a" * 99, "b"), {}, r"{} are dropped, fully masked: .* is max_seq_len too short\?"),
        ({"messages": 5}, {"on_bad_row": "skip"}, r"{} are dropped, cannot be used: .*on_bad_row=skip"),
    ],
)
def test_rows_that_are_dropped_by_reason(warned, bad, options, warning):
    assert warned([*good(199), bad], **options) == []
    found = warned([*good(99), bad], **options)
    assert re.match(warning.format(re.escape("1 of 100 rows (1.0%)")), found[0])
    assert len(found) == 1


def test_rows_that_are_left_out_on_purpose_are_no_warning(warned, tmp_path, monkeypatch):
    (tmp_path / "choice.py").write_text("def even(row):\n    return row['messages'][0]['content'][-2] in '02468'\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [*good(99), {**chat("8?", ""), "id": 1}]
    assert warned(good(99), filter="choice.even", validation_fraction=0.3) == []
    # and what is dropped is a share of those that were meant
    assert re.match(r"1 of 5\d rows \(\d\.\d%\) are dropped, empty answer", warned(rows, filter="choice.even")[0])


def test_rows_that_are_left_for_training_are_none_of_the_validation(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good(60)))
    data = load(tokenizer, str(tmp_path / "rows.jsonl"), max_seq_len=100, validation_fraction=0.2)
    assert warnings_of(data, tokenizer) == warnings_of(data.validation, tokenizer) == []


def test_tokens_and_ends_that_are_cut_off(warned):
    def text(length):
        return {"text": "a" * (length - 2)}  # BOS and EOS

    def cut(*rows):
        return warned(rows, too_long="truncate")

    texts = [{"text": f"{index:016}"} for index in range(100)]  # 18 tokens each
    assert cut(*texts, text(100 + 99)) == []  # 99 of 1999 tokens is 4.95%, 1 of 101 rows 0.99%
    (found,) = cut(*texts, text(100 + 100))
    assert found == "100 of 2,000 tokens (5.0%) are cut off: raise max_seq_len, or set dataset.too_long=split"
    (found,) = cut(*texts[1:], text(101))
    assert found == ("1 of 100 rows (1.0%) are cut inside an answer: raise max_seq_len, or set dataset.too_long=drop")
    assert cut(*texts[1:], text(100)) == []
    whole = {"input_ids": [*range(101)], "labels": [*range(100), -100]}  # what is cut off is not learned
    assert not any("inside an answer" in each for each in cut(whole))
    assert any("inside an answer" in each for each in cut({"input_ids": [*range(101)]}))


@pytest.mark.parametrize("too_long", ["truncate", "split"])
def test_a_conversation_that_is_cut_between_its_turns_keeps_its_ends(warned, too_long):
    two, turns = chat("a", "b"), chat("c", "d" * 90)["messages"]
    cut = {"messages": two["messages"] + turns}
    if too_long == "split":  # a turn behind it that is whole changes nothing
        assert any(
            "inside an answer" in each for each in warned([{"messages": turns + two["messages"]}], too_long="split")
        )
    clipped = [each for each in warned([cut], too_long=too_long) if "inside an answer" in each]
    assert len(clipped) == (too_long == "split")  # split keeps the second turn, whose answer is too long alone
    long = {"role": "tool", "content": "e" * 90}  # what is cut of its turn is not learned
    for messages in (turns, [*turns, *two["messages"]], [*turns, *two["messages"], long]):
        assert any("inside an answer" in each for each in warned([{"messages": messages}], too_long=too_long))
    assert not warned([{"text": "".join(map(str, range(200)))}], too_long="split")


def test_answers_with_next_to_nothing_to_learn(warned):
    tokens = [{"input_ids": [*range(30), 257], "labels": [-100] * 25 + [*range(25, 30), 257]}]
    little = {"input_ids": [9] * 30 + [257], "labels": [-100] * 30 + [257]}
    assert not any("at most one supervised token" in each for each in warned([*tokens * 199, little]))
    found = warned([*tokens * 99, little])
    assert "1 of 100 samples (1.0%) have at most one supervised token: are the answers blank? " in found[0]


def test_equal_rows(warned):
    assert warned([*good(199), good(1)[0]]) == []
    (found,) = warned([*good(99), {**good(1)[0], "id": 5}])
    assert found.startswith("1 of 100 samples (1.0%) are copies of other samples: ")


TEXT = "The answer follows from what was said before it."
STORY = {"instruction": "Tell me.", "input": "Of cats.", "output": "Once."}


@pytest.mark.parametrize(
    "columns",
    [{"explanation": TEXT}, {"notes": ["short", TEXT]}, {"context": "Paris"}, {"thinking": "Hm."},
     {"erklärung": "これは日本語で書かれたとても長い文章です。はい"}, {"turns": [{"role": "user", "content": TEXT}]}],
)  # fmt: skip
def test_columns_that_hold_text_of_their_own(warned, columns):
    (name,) = columns
    (found,) = warned([*good(99), {**chat("a", "b"), **columns}])
    assert re.match(rf"column left out that holds text: {name}, in 1 of 100 rows \(1\.0%\): .*dataset\.columns", found)
    assert warned([*good(199), {**chat("a", "b"), **columns}]) == []
    assert warned([*good(99), {**chat("a", "b"), **columns}], ignore=[name]) == []
    assert warned([*good(99), {"prompt": "a", "completion": "b", **columns}][99:])[0].startswith("column left out")


@pytest.mark.parametrize(
    "row",
    [
        {**chat("a", "b"), "id": 3, "source": "web", "url": "https://a.b/c", "tags": ["a", "b"], "context": None},
        {**chat(TEXT, "because"), "prompt": TEXT},  # there already
        {**STORY, "text": f"Below is an instruction that describes a task, as it was. {STORY}"},  # all of it once more
        {"input_ids": [72, 73, 257], "raw": TEXT},  # what the tokens were made of
    ],
)
def test_columns_that_hold_none(warned, row):
    assert warned([row]) == []


def test_a_column_that_quotes_a_part_of_the_row_holds_text_of_its_own(warned):
    row = {**STORY, "note": f"To '{STORY['instruction']}' a better story is in the other book."}
    (found,) = warned([row])
    assert found.startswith("column left out that holds text: note")


def test_both_sides_of_a_run_are_looked_at(tokenizer, tmp_path):
    for name, rows in {"a": good(50), "b": good(60)[55:] * 2}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = mix(tokenizer, {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in "ab"}, max_seq_len=100)
    held_out = load(tokenizer, str(tmp_path / "a.jsonl"), max_seq_len=100, take=3)
    found = warnings_about(parts_of(mixture, "training"), parts_of(held_out, "validation"), tokenizer)
    assert [each.split(" ")[0] for each in found] == ["training/b:", "3"]


def test_settings_that_warnings_name_exist(warned):
    """What a warning says to set can be set."""
    found = [
        *warned([{"text": "a" * 300}], too_long="truncate"),
        *warned(
            [chat("a", "b" * 90), {"messages": []}, chat("c", "d", context="Zoo")], too_long="drop", max_seq_len=60
        ),
    ]
    named = {word.rstrip(".,:?") for each in found for word in shlex.split(each) if word.startswith("dataset.")}
    too_long = {f"dataset.too_long={value}" for value in ("split", "drop", "truncate")}
    assert named == too_long | {"dataset.filter", "dataset.columns", "dataset.ignore", "dataset.train_on_end_of_turn"}
    settings = {name.removeprefix("dataset.").partition("=")[0] for name in named}
    assert settings <= load.__annotations__.keys()


DROPS_REASONING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- set reasoning = message.reasoning_content %}
        {%- if loop.last and reasoning %}{{- '<think>' + reasoning + '</think>' }}{% endif %}
        {{- (message.content or '').split('</think>')[-1] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}"""


def turns(*answers):
    """A question before each answer."""
    return {"messages": [each for answer in answers for each in ({"role": "user", "content": "Why?"}, answer)]}


@pytest.mark.parametrize(
    ("row", "remark"),
    [
        (turns({"reasoning_content": "a secret plan", "content": "yes"}, {"content": "no"}), "reasoning"),
        (turns({"content": "<think>a secret plan</think>yes"}, {"content": "no"}), "reasoning"),
        (turns({"content": "yes", "analysis": "one two three four five six seven eight"}), "analysis of an answer"),
        (turns({"reasoning_content": "a plan that is shown", "content": "yes"}), None),
        (turns({"content": "<think></think>yes\nand\n\nno"}, {"content": "no", "name": "bot"}), None),
    ],
)
def test_parts_of_answers_that_the_template_leaves_out_are_counted(folder, tmp_path, row, remark):
    """kin: modelscope/ms-swift#4939, hiyouga/LlamaFactory#10336."""
    for message in row["messages"]:
        message.setdefault("role", "assistant")
    (folder / "chat_template.jinja").write_text(DROPS_REASONING)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    remarks = load(Tokenizer(str(folder)), str(file), max_seq_len=400, workers=1).accounting.remarks
    assert dict(remarks) == ({f"{remark} left out by the template": 1} if remark else {})


def test_answers_in_a_row_are_counted(warned):
    two = chat("a question", "one answer")
    two["messages"].append({"role": "assistant", "content": "and another"})
    assert any("assistant messages in a row: in 1 of 11 rows" in each for each in warned([*good(10), two]))
