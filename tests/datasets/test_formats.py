"""Every format of docs/data.md from its example row, and other spellings found in datasets."""

import json
import re
from pathlib import Path

import pytest
from row_outcomes import outcomes

from tune.datasets.parse.columns import recognize
from tune.datasets.parse.formats import FORMATS
from tune.datasets.parse.messages import checked_messages
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
EXAMPLES = [
    pytest.param(name, json.loads(row), id=f"{name} {number}")
    for number, (name, row) in enumerate(re.findall(r"^\| `(\w+)` \| `(\{.*?\})` \|", DOCS.read_text(), re.MULTILINE))
]
LEARNED = {
    "chat": [["Hello!<|im_end|>"]],
    "sharegpt": [["Hello!<|im_end|>"]],
    "prompt_completion": [["4</s>"], ["Hello!<|im_end|>"]],
    "alpaca": [["Hello<|im_end|>"]],
    "tokens": [["105", "33"]],
    "text": [["Once upon a time ...</s>"]],
}
ASK, SAY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
CALL = {"name": "get", "arguments": {"at": "home"}}


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def read(tokenizer):
    """The learned text of a row's samples."""

    def read(row, **options):
        (outcome,) = outcomes(tokenizer, 10_000, [("row", row)], **options)
        assert outcome.mistake is None
        return [learned(sample, tokenizer) for sample in outcome.samples]

    return read


@pytest.fixture
def rendered(folder):
    """The messages of a row as the template receives them."""
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m | tojson }}|{% endgeneration %}{% endfor %}{{ tools | tojson }}"
    )

    def rendered(row):
        tokenizer = Tokenizer(str(folder))
        (outcome,) = outcomes(tokenizer, 10_000, [("row", row)], train_on="all")
        assert outcome.mistake is None
        *messages, tools = tokenizer.decode(outcome.samples[0].tokens.tolist()).split("|")
        return [json.loads(message) for message in messages], json.loads(tools)

    return rendered


def learned(sample, tokenizer):
    return tokenizer.decode([label for label in sample.labels if label != -100])


def test_docs_show_an_example_of_each_format():
    named = {example.values[0] for example in EXAMPLES}
    assert named == {format.name for format in FORMATS["supervised"]}


@pytest.mark.parametrize(("name", "row"), EXAMPLES)
def test_docs_examples_are_recognized_and_read(name, row, tokenizer, read):
    if name == "tokens":
        (outcome,) = outcomes(tokenizer, 1000, [("row", row)])
        assert outcome.samples[0].tokens.tolist() == [72, 105, 33]
        assert outcome.samples[0].labels.tolist() == [105, 33, -100]
    else:
        assert recognize(row, {}, "row", FORMATS["supervised"]).name == name
        assert read(row) in LEARNED[name]


# chats


def test_sharegpt_with_tools_becomes_a_chat(rendered):
    row = {
        "system": "Be short.",
        "tools": '[{"name": "get"}]',
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "12"},
            {"from": "gpt", "value": "Hello!"},
        ],
    }
    messages, tools = rendered(row)
    assert messages == [
        {"role": "system", "content": "Be short."},
        ASK,
        {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "12"},
        SAY,
    ]
    assert tools == [{"name": "get"}]


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"name": "get", "arguments": '{"at": "home"}'},
        {"type": "function", "id": "1", "function": {"name": "get", "arguments": '{"at": "home"}'}},
    ],
    ids=["flat", "JSON", "OpenAI"],
)
def test_tool_calls_are_normalized(rendered, call):
    (call,) = rendered({"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]})[0][1][
        "tool_calls"
    ]
    assert call["type"] == "function" and call["function"] == CALL


def test_template_that_expects_arguments_as_json(folder, tokenizer):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + ':' + c.function.arguments }}{% endfor %}{% endgeneration %}{% endfor %}"
    )
    messages = [ASK, {"role": "assistant", "tool_calls": [CALL]}]
    (outcome,) = outcomes(Tokenizer(str(folder)), 100, [("row", {"messages": messages})])
    assert tokenizer.decode(outcome.samples[0].tokens.tolist()) == 'Higet:{"at": "home"}'


def test_template_that_omits_a_tool_call_is_a_mistake(tokenizer):
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    (outcome,) = outcomes(tokenizer, 100, [("row", {"messages": messages})])
    assert (
        outcome.mistake == "row: the chat template leaves out the call of the tool get: it does not support tool calls"
    )


def test_text_parts_are_joined_as_templates_join_them(folder, tokenizer):
    transformers = pytest.importorskip("transformers")
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}|{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    messages = [ASK, {"role": "assistant", "content": parts}]
    reference = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    (outcome,) = outcomes(Tokenizer(str(folder)), 100, [("row", {"messages": messages})])
    assert tokenizer.decode(outcome.samples[0].tokens.tolist()) == reference == "Hi|Hello!|"


def test_repeated_or_empty_system_column_adds_nothing(rendered):
    system = {"role": "system", "content": "Be short."}
    assert rendered({"messages": [system, ASK, SAY], "system": "Be short."})[0] == [system, ASK, SAY]
    assert rendered({"messages": [ASK, SAY], "system": ""})[0] == [ASK, SAY]


def test_weight_0_and_1_act_like_train(read):
    assert read({"messages": [ASK, {**SAY, "weight": 0}, ASK, SAY]}) == ["Hello!<|im_end|>"]
    assert read({"messages": [ASK, {**SAY, "weight": 1}]}) == ["Hello!<|im_end|>"]
    both = {"role": "assistant", "content": "No.", "weight": 1, "train": False}
    assert read({"messages": [ASK, both, ASK, SAY]}) == ["Hello!<|im_end|>"]


def test_alpaca_without_input(rendered):
    row = {"instruction": "Say.", "output": "Hello!"}
    expected = [{"role": "user", "content": "Say."}, SAY]
    assert rendered(row)[0] == rendered({**row, "input": ""})[0] == rendered({**row, "input": None})[0] == expected
    assert rendered({**row, "input": "Now"})[0][0]["content"] == "Say.\n\nNow"


def test_question_and_answer_columns_as_a_chat(read):
    columns = {"instruction": "question", "output": "answer"}
    row = {"question": "2+2", "answer": "4", "id": 3}
    assert read(row, columns=columns) == ["4<|im_end|>"]


# tokens


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({}, [2, 3, 4, -100]),
        ({"labels": [-100, -100, 3, 4]}, [-100, 3, 4, -100]),
        ({"completion_mask": [0, 0, 1, 1]}, [-100, 3, 4, -100]),
        ({"assistant_masks": [0, 0, 1, 0]}, [-100, 3, -100, -100]),
        ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}, [2, -100, 4, -100]),
        ({"labels": [-100, 2, 3, 4], "completion_mask": [1, 1, 0, 1]}, [2, -100, 4, -100]),
    ],
)
def test_labels_and_masks_of_tokens(tokenizer, columns, labels):
    (outcome,) = outcomes(tokenizer, 100, [("row", {"input_ids": [1, 2, 3, 4], **columns})])
    assert outcome.samples[0].labels.tolist() == labels


@pytest.mark.parametrize("mask", [[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]])
def test_padding_is_removed(tokenizer, mask):
    kept = [token for token, on in zip([0, 2, 3, 4], mask, strict=True) if on]
    (outcome,) = outcomes(tokenizer, 100, [("row", {"input_ids": [0, 2, 3, 4], "attention_mask": mask})])
    assert outcome.samples[0].tokens.tolist() == kept
    assert outcome.samples[0].labels.tolist() == [*kept[1:], -100]


@pytest.mark.parametrize("content", ["Let me look.", "", None])
@pytest.mark.parametrize("arguments", [CALL["arguments"], json.dumps(CALL["arguments"])], ids=["object", "JSON"])
def test_older_function_calls_are_tool_calls(rendered, content, arguments):
    """OpenAI's older form: `function_call` in an answer, and the role `function` for the result."""
    answer = {"role": "assistant", "content": content, "function_call": {**CALL, "arguments": arguments}}
    messages, _ = rendered({"messages": [ASK, answer, {"role": "function", "name": "get", "content": "12"}, SAY]})
    text = {} if content is None else {"content": content}
    assert messages[1] == {"role": "assistant", **text, "tool_calls": [{"type": "function", "function": CALL}]}
    assert messages[2] == {"role": "tool", "name": "get", "content": "12"}


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user", "content": "a", "function_call": CALL}, r"messages\[0\]"),
        ({"role": "assistant", "content": "a", "function_call": CALL, "tool_calls": [CALL]}, r"messages\[0\]"),
        ({"role": "assistant", "content": "a", "function_call": "get()"}, r"messages\[0\]\.function_call"),
        ({"role": "assistant", "content": "a", "function_call": "auto"}, r"messages\[0\]\.function_call"),
    ],
)
def test_function_calls_that_cannot_be_read_are_refused(message, place):
    with pytest.raises(TuneError, match=place):
        checked_messages([message], "messages")
