"""Warnings about data that is trainable but rarely intended: their thresholds and the settings they name."""

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
    """Return `number` distinct rows."""
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
def test_dropped_rows_get_a_warning_by_reason(warned, bad, options, warning):
    assert warned([*good(199), bad], **options) == []
    messages = warned([*good(99), bad], **options)
    assert re.match(warning.format(re.escape("1 of 100 rows (1.0%)")), messages[0])
    assert len(messages) == 1


def test_no_warning_for_rows_left_out_on_purpose(warned, tmp_path, monkeypatch):
    (tmp_path / "choice.py").write_text("def even(row):\n    return row['messages'][0]['content'][-2] in '02468'\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [*good(99), {**chat("8?", ""), "id": 1}]
    assert warned(good(99), filter="choice.even", validation_fraction=0.3) == []
    # the share of dropped rows counts only rows that pass the filter
    assert re.match(r"1 of 5\d rows \(\d\.\d%\) are dropped, empty answer", warned(rows, filter="choice.even")[0])


def test_no_warning_for_rows_of_the_other_split(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good(60)))
    data = load(tokenizer, str(tmp_path / "rows.jsonl"), max_seq_len=100, validation_fraction=0.2)
    assert warnings_of(data, tokenizer) == warnings_of(data.validation, tokenizer) == []


def test_cut_tokens_and_answers_get_a_warning(warned):
    def text(length):
        return {"text": "a" * (length - 2)}  # BOS and EOS

    def cut(*rows):
        return warned(rows, too_long="truncate")

    texts = [{"text": f"{index:016}"} for index in range(100)]  # 18 tokens each
    assert cut(*texts, text(100 + 99)) == []  # 99 of 1999 tokens is 4.95%, 1 of 101 rows 0.99%
    (message,) = cut(*texts, text(100 + 100))
    assert message == "100 of 2,000 tokens (5.0%) are cut off: raise max_seq_len, or set dataset.too_long=split"
    (message,) = cut(*texts[1:], text(101))
    assert message == ("1 of 100 rows (1.0%) are cut inside an answer: raise max_seq_len, or set dataset.too_long=drop")
    assert cut(*texts[1:], text(100)) == []
    whole = {"input_ids": [*range(101)], "labels": [*range(100), -100]}  # the removed token is not learned
    assert not any("inside an answer" in message for message in cut(whole))
    assert any("inside an answer" in message for message in cut({"input_ids": [*range(101)]}))


@pytest.mark.parametrize("too_long", ["truncate", "split"])
def test_conversation_cut_between_turns_is_not_cut_inside_an_answer(warned, too_long):
    two, turns = chat("a", "b"), chat("c", "d" * 90)["messages"]
    cut = {"messages": two["messages"] + turns}
    if too_long == "split":  # a whole turn after it changes nothing
        assert any(
            "inside an answer" in message
            for message in warned([{"messages": turns + two["messages"]}], too_long="split")
        )
    clipped = [message for message in warned([cut], too_long=too_long) if "inside an answer" in message]
    assert len(clipped) == (too_long == "split")  # split keeps the second turn, whose answer alone is too long
    long = {"role": "tool", "content": "e" * 90}  # the removed part of its turn is not learned
    for messages in (turns, [*turns, *two["messages"]], [*turns, *two["messages"], long]):
        assert any("inside an answer" in message for message in warned([{"messages": messages}], too_long=too_long))
    assert not warned([{"text": "".join(map(str, range(200)))}], too_long="split")


def test_nearly_blank_answers_get_a_warning(warned):
    tokens = [{"input_ids": [*range(30), 257], "labels": [-100] * 25 + [*range(25, 30), 257]}]
    little = {"input_ids": [9] * 30 + [257], "labels": [-100] * 30 + [257]}
    assert not any("at most one supervised token" in message for message in warned([*tokens * 199, little]))
    messages = warned([*tokens * 99, little])
    assert "1 of 100 samples (1.0%) have at most one supervised token: are the answers blank? " in messages[0]


def test_duplicate_rows_get_a_warning(warned):
    assert warned([*good(199), good(1)[0]]) == []
    (message,) = warned([*good(99), {**good(1)[0], "id": 5}])
    assert message.startswith("1 of 100 samples (1.0%) are copies of other samples: ")


TEXT = "The answer follows from what was said before it."
STORY = {"instruction": "Tell me.", "input": "Of cats.", "output": "Once."}


@pytest.mark.slow
@pytest.mark.parametrize(
    "columns",
    [{"explanation": TEXT}, {"notes": ["short", TEXT]}, {"context": "Paris"}, {"thinking": "Hm."},
     {"erklärung": "これは日本語で書かれたとても長い文章です。はい"}, {"turns": [{"role": "user", "content": TEXT}]}],
)  # fmt: skip
def test_ignored_columns_with_text_get_a_warning(warned, columns):
    (name,) = columns
    (message,) = warned([*good(99), {**chat("a", "b"), **columns}])
    assert re.match(
        rf"column left out that holds text: {name}, in 1 of 100 rows \(1\.0%\): .*dataset\.columns", message
    )
    assert warned([*good(199), {**chat("a", "b"), **columns}]) == []
    assert warned([*good(99), {**chat("a", "b"), **columns}], ignore=[name]) == []
    assert warned([*good(99), {"prompt": "a", "completion": "b", **columns}][99:])[0].startswith("column left out")


@pytest.mark.parametrize(
    "row",
    [
        {**chat("a", "b"), "id": 3, "source": "web", "url": "https://a.b/c", "tags": ["a", "b"], "context": None},
        {**chat(TEXT, "because"), "prompt": TEXT},  # already in the row
        {
            **STORY,
            "text": f"Below is an instruction that describes a task, as it was. {STORY}",
        },  # repeats the whole row
        {"input_ids": [72, 73, 257], "raw": TEXT},  # the source of the tokens
    ],
)
def test_no_warning_for_columns_without_text_of_their_own(warned, row):
    assert warned([row]) == []


def test_column_that_quotes_part_of_the_row_gets_a_warning(warned):
    row = {**STORY, "note": f"To '{STORY['instruction']}' a better story is in the other book."}
    (message,) = warned([row])
    assert message.startswith("column left out that holds text: note")


def test_training_and_validation_data_are_both_checked(tokenizer, tmp_path):
    for name, rows in {"a": good(50), "b": good(60)[55:] * 2}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = mix(tokenizer, {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in "ab"}, max_seq_len=100)
    held_out = load(tokenizer, str(tmp_path / "a.jsonl"), max_seq_len=100, take=3)
    messages = warnings_about(parts_of(mixture, "training"), parts_of(held_out, "validation"), tokenizer)
    assert [message.split(" ")[0] for message in messages] == ["training/b:", "3"]


def test_settings_that_warnings_name_exist(warned):
    """Every setting that a warning suggests exists."""
    messages = [
        *warned([{"text": "a" * 300}], too_long="truncate"),
        *warned(
            [chat("a", "b" * 90), {"messages": []}, chat("c", "d", context="Zoo")], too_long="drop", max_seq_len=60
        ),
    ]
    named = {
        word.rstrip(".,:?") for message in messages for word in shlex.split(message) if word.startswith("dataset.")
    }
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
    """Return a row with a question before each answer."""
    return {"messages": [message for answer in answers for message in ({"role": "user", "content": "Why?"}, answer)]}


@pytest.mark.parametrize(
    ("row", "remark"),
    [
        (turns({"reasoning_content": "a secret plan", "content": "yes"}, {"content": "no"}), "reasoning"),
        (turns({"content": "<think>a secret plan</think>yes"}, {"content": "no"}), "reasoning"),
        (turns({"content": "First <think></think>yes"}, {"content": "no"}), "a part of an answer"),
        (turns({"content": "yes", "analysis": "one two three four five six seven eight"}), "analysis of an answer"),
        (turns({"reasoning_content": "a plan that is shown", "content": "yes"}), None),
        (turns({"content": "<think></think>yes\nand\n\nno"}, {"content": "no", "id": "bot"}), None),
    ],
)
def test_parts_of_answers_omitted_by_the_template_are_counted(folder, tmp_path, row, remark):
    """kin: modelscope/ms-swift#4939, hiyouga/LlamaFactory#10336."""
    for message in row["messages"]:
        message.setdefault("role", "assistant")
    (folder / "chat_template.jinja").write_text(DROPS_REASONING)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    remarks = load(Tokenizer(str(folder)), str(file), max_seq_len=400, workers=1).accounting.remarks
    assert dict(remarks) == ({f"{remark} left out by the template": 1} if remark else {})


def test_consecutive_answers_are_counted(warned):
    two = chat("a question", "one answer")
    two["messages"].append({"role": "assistant", "content": "and another"})
    assert any("assistant messages in a row: in 1 of 11 rows" in message for message in warned([*good(10), two]))
