"""Errors in files and rows name the file and row, what was found and what would be valid."""

import gzip
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_outcomes import outcomes

from tune.datasets import load
from tune.datasets.parse.formats import FORMATS
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
GOOD = {"messages": [USER, ASSISTANT]}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def read(tokenizer, tmp_path):
    def read(name, content, **options):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return load(tokenizer, str(tmp_path / name), max_seq_len=100, **options)

    return read


FILES = {
    "half a string": (
        "data.jsonl",
        '{"text": "a"}\n{"text": "b',
        r"data.jsonl:2: malformed JSON: Unterminated string starting at column 10: ",
    ),
    "half a list with half a string": (
        "data.json",
        '[{"text": "b',
        r"data.json:1: malformed JSON: Unterminated string starting at column 11$",
    ),
    "half a line": ("data.jsonl", '{"text": "a"}\n{"text": "b"', r"data.jsonl:2: malformed JSON: .* at column 13"),
    "a line without its last brackets": (
        "data.jsonl",
        json.dumps({"messages": [USER, {"role": "assistant", "content": "word " * 50}]})[:-2] + "\n" + json.dumps(GOOD),
        r"data.jsonl:1: malformed JSON: .* at column 336 \(the text ends .*\): `\.\.\.[^'\\]*word word \"}`",
    ),
    "a comma too few in a long line": (
        "data.jsonl",
        '{"text": "' + "word " * 50 + '" "source": "web", "note": "' + "x" * 90 + '"}',
        r"data.jsonl:1: malformed JSON: .* at column 263: `\.\.\.\w* word.*\"source\": \"web\", .*\.\.\.`",
    ),
    "two rows in a line": (
        "data.jsonl",
        '{"text": "a"}{"text": "b"}',
        r"data.jsonl:1: malformed JSON: Extra data .* one complete row",
    ),
    "Python and not JSON": ("data.jsonl", "{'text': 'a'}", "data.jsonl:1: malformed JSON: .* double quotes"),
    "a page of errors": ("data.jsonl", "<!DOCTYPE html><html>", "data.jsonl:1: malformed JSON: .*<!DOCTYPE html>"),
    "nested without end": (
        "data.jsonl",
        '{"text": ' + "[" * 100_000,
        "data.jsonl:1: malformed JSON: maximum recursion",
    ),
    "a huge number": ("data.jsonl", '{"text": ' + "1" * 5000 + "}", "data.jsonl:1: malformed JSON: Exceeds the limit"),
    "half a list": ("data.json", '[{"text": "a"},\n {"text" "b"}]', r"data.json:2: malformed JSON: .* at column 10"),
    "a row without its last bracket": ("data.json", '{"text": "a"\n', r"data.json:.* \(the text ends inside a"),
    "half an object": ("data.json", '{"data":\n[}', "data.json:2: malformed JSON"),
    "rows in Python": ("data.json", "{'text': 'a'}\n", "data.json:1: malformed JSON.* or the file one list of them"),
    "two lists of rows": (
        "data.json",
        json.dumps({"data": [GOOD], "rows": [GOOD]}),
        "the columns data, rows match no known format",
    ),
    "lists of rows": (
        "data.json",
        json.dumps({"train": [GOOD], "test": [GOOD]}),
        "train is a list of objects: if these are the rows, save this list alone as a .json file",
    ),
    "nothing": ("data.jsonl", "", r"data.jsonl has no rows: .* \{\"messages\": "),
    "an empty list": ("data.json", "[]", "data.json has no rows"),
    "a header alone": ("data.csv", "text\n", "data.csv has no rows"),
    "a number in a list": ("data.json", "[[1]]", r"data.json:row 1: the row is \[1\]; it must be an object"),
    "null": ("data.jsonl", '{"text": "a"}\nnull', "data.jsonl:2: the row is null; it must be an object"),
    "Latin 1": (
        "data.jsonl",
        b'{"text": "a"}\n{"text": "\xe9"}',
        "data.jsonl:2: not UTF-8 text: .* Save the file as UTF-8",
    ),
    "Latin 1 in a table": ("data.csv", b"text\na\n\xe9\n", "data.csv:3: not UTF-8 text"),
    "Latin 1 in a list": ("data.json", b'[{"text": "\xe9"}]', "data.json: not UTF-8 text"),
    "UTF-16": ("data.tsv", "text\na\n".encode("utf-16"), "data.tsv:1: not UTF-8 text"),
    "an open quote": ("data.csv", 'text\n"a', "data.csv:row 1: malformed CSV"),
    "commas without quotes": ("data.csv", "text\na\nb, c", "data.csv:row 2: the row has more cells than the header"),
    "a cell too few": ("data.csv", "prompt,completion\na", "data.csv:row 1: the row has fewer cells than the header"),
    "a column twice": ("data.csv", "text,text\na,b", "data.csv: the header has the column 'text' twice"),
    "not Parquet": ("data.parquet", "PAR1", "data.parquet: malformed Parquet"),
    "not Arrow": ("data.arrow", "ARROW1 ", "data.arrow: malformed Arrow"),
    "not gzip": ("data.jsonl.gz", b"hello", "data.jsonl.gz cannot be read: Not a gzipped file"),
    "half of a gzip": (
        "data.jsonl.gz",
        gzip.compress(b'{"text": "a"}\n' * 999)[:-9],
        "data.jsonl.gz cannot be read: .* ended before",
    ),
    "gzip by another name": (
        "data.jsonl",
        gzip.compress(b"{}"),
        "data.jsonl:1: gzip, not UTF-8 text",
    ),
    "not zst": ("data.jsonl.zst", b"hello", "data.jsonl.zst cannot be read: ZSTD"),
    "not xz": ("data.jsonl.xz", b"hello", "data.jsonl.xz cannot be read: Input format"),
    "left on a server": ("data.parquet", POINTER, "data.parquet is a Git LFS pointer.* git lfs pull"),
    "another kind": (
        "data.xlsx",
        "a",
        r"cannot read \.xlsx files\. Supported: \.json, \.jsonl, \.csv, \.tsv, \.parquet.* as \.csv",
    ),
    "no kind": ("data", "a", r"cannot read such files\. Supported"),
    "other columns": (
        "data.jsonl",
        '{"this": "a", "that": "b"}',
        "data.jsonl:1: the columns this, that match no known format: messages; conv.*"
        "'dataset.columns={instruction: this, output: that}'",
    ),
    "no columns": ("data.jsonl", "{}", r"data.jsonl:1: the columns \(none\) match no"),
}


@pytest.mark.parametrize(("name", "content", "message"), FILES.values(), ids=FILES)
def test_malformed_files_are_reported(read, name, content, message):
    if name.endswith((".parquet", ".arrow", ".zst")):
        pytest.importorskip("pyarrow")
    with pytest.raises(TuneError, match=f"(?s){message}"):
        read(name, content)


def chat(*messages, **columns):
    return {"messages": list(messages), **columns}


def calling(call):
    return chat(USER, {"role": "assistant", "tool_calls": call})


CHATS = {
    "role": (chat({"role": "asistant"}), r'messages\[0\].role is "asistant"; .*Did you mean .assistant.\?'),
    "no role": (chat({"content": "a"}), r"messages\[0\].role is missing; it must be one of system, "),
    "content": (chat({"role": "user", "content": 4}), r"messages\[0\].content is 4; it must be a string"),
    "content that is not a number": (
        chat({"role": "user", "content": float("nan")}),
        "content is NaN; it must be a string",
    ),
    "content of a tool": (chat({"role": "tool", "content": {"a": 1}}), r'content is {"a": 1}; it must be a string'),
    "no content": (chat({"role": "user", "content": None}), r"messages\[0\].content is missing"),
    "no parts": (chat({"role": "user", "content": []}), r"content is \[\]; it must be a string"),
    "an image": (
        chat({"role": "user", "content": [{"type": "image_url"}]}),
        r'content\[0\].type is "image_url"; only text',
    ),
    "a part without text": (chat({"role": "user", "content": [{"type": "text"}]}), r"content\[0\].text is missing"),
    "a name of ShareGPT": (chat({"from": "hunan", "value": "a"}), r'from is "hunan"; .*Did you mean .human.\?'),
    "no value": (chat({"from": "human", "text": "a"}), r"messages\[0\].value is missing; it must be a string"),
    "a call that is no JSON": (chat({"from": "function_call", "value": "get()"}), "value is not valid JSON"),
    "a text for messages": (chat() | {"messages": "Hi"}, 'messages is "Hi"; it must be a list of messages'),
    "broken JSON for messages": (chat() | {"messages": "[{"}, "messages is not valid JSON"),
    "a text for a message": (chat("a"), r'messages\[0\] is "a"; it must be an object'),
    "train": (chat({**ASSISTANT, "train": "no"}), r'messages\[0\].train is "no"; it must be true or false'),
    "weight": (chat({**ASSISTANT, "weight": 1.5}), r"messages\[0\].weight is 1.5; it must be a number from 0"),
    "reasoning": (
        chat({**ASSISTANT, "reasoning_content": ["a"]}),
        r'reasoning_content is \["a"\]; it must be a string',
    ),
    "calls": (calling({"name": "f"}), r'tool_calls is {"name": "f"}; it must be a list of calls'),
    "a call without a name": (
        calling([{"function": {"arguments": {}}}]),
        r"tool_calls\[0\].function.name is missing; it must be the name of a tool",
    ),
    "a call of nothing": (calling([{"function": "f"}]), r"function.name is missing"),
    "arguments": (calling([{"name": "f", "arguments": [1]}]), r"arguments is \[1\]; it must be an object"),
    "arguments that are no JSON": (calling([{"name": "f", "arguments": "{x"}]), "arguments is not valid JSON"),
    "a call by the user": (chat({**USER, "tool_calls": [{"name": "f"}]}), "only the assistant can call tools"),
    "tools": (chat(USER, ASSISTANT, tools="{"), "tools is not valid JSON"),
    "a tool": (chat(USER, ASSISTANT, tools=["f"]), "it must be a list of JSON schemas"),
    "system": (chat(USER, ASSISTANT, system=1), "system is 1; it must be a string"),
    "two systems": (
        chat({"role": "system", "content": "a"}, USER, system="b"),
        r"system and messages\[0\] are both system messages",
    ),
    "no object": (["a"], r'the row is \["a"\]; it must be an object'),
    "no column": ({"text": "a"}, "no column messages, .* this row has text"),
    "half a pair": (chat(USER, {"role": "assistant", "content": "\ud83d"}), "half of a character pair"),
}


@pytest.mark.parametrize(("row", "message"), CHATS.values(), ids=CHATS)
def test_invalid_conversations_are_reported(read, row, message):
    with pytest.raises(TuneError, match=rf"(?s)rows cannot be used:\n  data\.jsonl:3: .*{message}"):
        read("data.jsonl", f"{json.dumps(GOOD)}\n\n{json.dumps(row)}")


OTHERS = {
    "text": ({"text": 5}, "text is 5; it must be a string"),
    "prompt": ({"prompt": None, "completion": "a"}, "prompt is missing; it must be a string: prompt and"),
    "completion": (
        {"prompt": "a", "completion": float("nan")},
        "completion is NaN; it must be a string: prompt",
    ),
    "two kinds": ({"prompt": [USER], "completion": "a"}, "prompt and completion are two strings or two lists"),
    "instruction": ({"instruction": 1, "output": "a"}, "instruction is 1; it must be a string"),
    "ids": ({"input_ids": [1.0, 2]}, r"input_ids is \[1.0, 2\]; it must be a list of integers"),
    "ids as text": ({"input_ids": "1 2"}, 'input_ids is "1 2"; it must be a list of integers'),
    "an id below zero": ({"input_ids": [1, -2]}, "input_ids holds -2, which is not a token id"),
    "an id too large": ({"input_ids": [1, 2**40]}, "input_ids holds 1099511627776, which is not a token id"),
    "too few labels": ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries for 2 input_ids"),
    "shifted labels": (
        {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
        r"labels has 2 where input_ids has 1; .*\(not the next\)",
    ),
    "mask": ({"input_ids": [1, 2], "completion_mask": [0, 2]}, "completion_mask holds 2; it must hold 1 and 0"),
    "a hole": ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, r"attention_mask\[1\] is 0 between tokens"),
    "padding": ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "attention_mask is 0 everywhere"),
}


@pytest.mark.parametrize(("row", "message"), OTHERS.values(), ids=OTHERS)
def test_other_invalid_rows_are_reported(read, row, message):
    with pytest.raises(TuneError, match=rf"data\.jsonl:1: .*{message}"):
        read("data.jsonl", json.dumps(row))


WORDS = [
    "role",
    "content",
    "from",
    "value",
    "type",
    "text",
    "train",
    "weight",
    "tool_calls",
    "function",
    "name",
    "arguments",
]
VALUES = ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "text", "[]", "{}", "", "a", "\ud83d"]
JSON = st.recursive(
    st.sampled_from([None, True, 0, 1, -100, 2**40, 0.5, float("nan"), *VALUES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=20,
)
COLUMNS = [name for format in FORMATS["supervised"] for name in (*format.columns, *format.optional)]
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(VALUES), "content": JSON}, optional={"tool_calls": JSON, "train": JSON}
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=st.dictionaries(st.sampled_from(COLUMNS), JSON | st.lists(MESSAGE, max_size=3), max_size=4) | JSON)
def test_any_row_is_either_used_or_dropped(tokenizer, row):
    for outcome in outcomes(tokenizer, 20, [("the row", row)], too_long="split", validation_fraction=0.1):
        assert bool(outcome.samples) + (outcome.dropped is not None) == 1
        assert all(0 < len(sample.tokens) <= 20 for sample in outcome.samples)


def test_useless_rows_are_counted(read):
    rows = {
        "empty completion": [
            {"prompt": "a", "completion": ""},
            {"prompt": "a", "completion": None},
            {"prompt": [USER], "completion": [{**ASSISTANT, "content": ""}]},
        ],
        "empty output": [{"instruction": "a", "output": ""}],
        "empty instruction": [{"instruction": "", "input": "", "output": "a"}],
        "empty input_ids": [{"input_ids": []}],
        "empty messages": [chat(), chat() | {"messages": None}, chat() | {"messages": "[]"}],
        "empty conversations": [{"conversations": []}],
        "no assistant message": [chat(USER)],
        "no message to learn": [chat(USER, {**ASSISTANT, "train": False})],
        "empty answer": [
            chat(USER, {**ASSISTANT, "content": ""}),
            chat(USER, {**ASSISTANT, "content": "", "tool_calls": []}),
        ],
        "fully masked": [{"input_ids": [1, 2], "labels": [-100, -100]}],
    }
    for reason, useless in rows.items():
        with pytest.raises(
            TuneError, match=rf"none of the {len(useless)} rows can be used: {reason} \({len(useless)}\)$"
        ):
            read("data.jsonl", "\n".join(map(json.dumps, useless)))
    accounting = read("data.jsonl", '{"text": ""}\n{"text": null}\n{"text": "a"}').accounting
    assert (accounting.kept, accounting.dropped) == (1, {"empty text": 2})


def test_empty_answer_among_others_is_not_learned(read):
    data = read("data.jsonl", json.dumps(chat(USER, {**ASSISTANT, "content": ""}, USER, ASSISTANT)))
    alone = read("data.jsonl", json.dumps(chat(USER, ASSISTANT)))
    assert data.accounting.remarks == {"empty answer, not learned": 1}
    assert data.accounting.supervised_tokens == alone.accounting.supervised_tokens
    whole = read("data.jsonl", json.dumps(chat(USER, {**ASSISTANT, "content": ""})), train_on="all").accounting
    assert whole.supervised_tokens == whole.tokens - 1 and not whole.remarks


def test_huge_row_is_split_or_truncated(read):
    data = read("data.jsonl", json.dumps({"text": "a" * 100_000}))
    assert (
        data.accounting.samples == 1 + math.ceil((100_002 - 100) / 99) and data.accounting.split == 1
    )  # each piece has BOS
    data = read("data.jsonl", json.dumps({"text": "a" * 100_000}), too_long="truncate")
    assert data.accounting.cut_tokens == 100_002 - 100


def test_null_columns_do_not_decide_the_format(read):
    data = read("data.jsonl", '{"messages": null, "text": "a", "id": 1}')
    assert (data.accounting.format, data.accounting.ignored_columns) == ("text", ["messages", "id"])
    assert "columns ignored    messages, id" in data.accounting.table()


def test_messages_as_json_in_a_table(read):
    assert read("data.csv", 'messages\n"[{""role"": ""assistant"", ""content"": ""Hi""}]"').accounting.kept == 1
