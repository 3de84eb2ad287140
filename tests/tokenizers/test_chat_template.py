"""Conversations are rendered byte for byte like in transformers."""

import datetime
import json
from datetime import date, time, timedelta, timezone
from decimal import Decimal

import numpy as np
import pytest
from helpers import as_in_transformers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from sample_texts import conversations
from tokenizer_references import transformers_rendering

from tune.errors import TuneError
from tune.tokenizers import ChatTemplate, Tokenizer

transformers = pytest.importorskip("transformers")

TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "<b>é</b>", "parameters": {"z": 1, "a": 2}}}
]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich"}}}]}
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "Hello <there>"}, {"role": "assistant", "content": "Hi, 🦊!\n"}],
    "two turns": [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb", "tool_calls": None},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "thinking": "so"},
    ],
    "system": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "a"}],
    "tool": [{"role": "user", "content": "a"}, CALL, {"role": "tool", "content": "12°"}],
    "two calls": [{"role": "user", "content": "a"}, {**CALL, "tool_calls": CALL["tool_calls"] * 2}],
}


@as_in_transformers("5.23")
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompt", [False, True], ids=["whole", "prompt"])
def test_renders_like_transformers(folder, any_template, messages, tools, prompt):
    (folder / "chat_template.jinja").write_text(any_template)
    reference = transformers.AutoTokenizer.from_pretrained(folder)

    def theirs():
        return reference.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)

    def ours():
        return Tokenizer(str(folder), date=None).apply_chat_template(
            messages, add_generation_prompt=prompt, tools=tools
        )

    try:
        expected = theirs()
    except Exception as refusal:
        with pytest.raises(TuneError) as error:
            ours()
        assert str(refusal) in str(error.value)
    else:
        assert ours() == expected


@as_in_transformers("5.23")
def test_200_conversations_are_rendered_like_transformers(any_template):
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    ours, theirs = ChatTemplate(any_template, variables), transformers_rendering(any_template, variables)
    rendered = 0
    for conversation in conversations(200):
        try:
            expected = theirs(**conversation)
        except Exception as refusal:
            with pytest.raises(TuneError) as error:
                ours.render(**conversation)
            assert str(refusal) in str(error.value)
        else:
            assert ours.render(**conversation) == expected
            rendered += 1
    assert rendered > 50


@as_in_transformers("5.23")
@pytest.mark.parametrize(
    "source",
    [
        "{{ documents }}{{ tools }}",
        "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}",
        "{% for m in messages %}{{ loop.index }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
        "{{ messages[0].list }} {{ messages[0] | tojson(indent=2) }}",
        "{{ messages[9].content.x }}",
        "{{ 1 // 0 }}",
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ 'a'.nothing() }}",
        "{{ raise_exception('No!') }}",
    ],
)
def test_globals_and_failures_match_transformers(source):
    message = {"role": "user", "content": "é", "list": (1, None, 2.5, True)}
    theirs = transformers_rendering(source, {"bos_token": "<s>"})
    arguments = {"messages": [message] * 3, "documents": [{"title": "a", "text": "b"}]}
    try:
        expected = theirs(**arguments)
    except Exception:
        with pytest.raises(TuneError, match=r"refuses|fails on"):
            ChatTemplate(source, {"bos_token": "<s>"}).render(**arguments)
    else:
        assert ChatTemplate(source, {"bos_token": "<s>"}).render(**arguments) == expected


def test_variables_reach_the_template(folder):
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ enable_thinking }}")
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.apply_chat_template([], enable_thinking=False) == "</s>False"
    assert tokenizer.apply_chat_template([], eos_token="!", enable_thinking=1) == "!1"


def test_generation_blocks_are_found_inside_macros():
    template = ChatTemplate(
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}:{{ say(m) if m.role == 'assistant' else m.content }};{% endfor %}"
    )
    text, spans = template.render_with_spans(CONVERSATIONS["one turn"])
    assert text == "user:Hello <there>;assistant:Hi, 🦊!\n;"
    assert [text[start:end] for start, end in spans] == ["Hi, 🦊!\n"]


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(attack):
    with pytest.raises(TuneError, match=r"unsafe|undefined"):
        ChatTemplate(attack).render([{"role": "user", "content": "a"}])


def test_syntax_error_names_its_line():
    with pytest.raises(TuneError, match="the template is not a valid Jinja template: line 2"):
        ChatTemplate("{{ messages }}\n{% if %}", origin="the template")


DUMPED = "{{ messages | tojson }}{{ tools | tojson }}"
ZONE = timezone(timedelta(hours=2))


@pytest.mark.parametrize("value", [date(2024, 5, 1), datetime.datetime(2024, 5, 1, 12, 0, tzinfo=ZONE), time(12, 30)])
def test_dates_and_times_are_rendered_as_iso_texts(value):
    tools, messages = [{"default": value}], [{"role": "user", "at": [value]}]
    text = ChatTemplate(DUMPED).render(messages, tools=tools)
    assert text == "".join(json.dumps(part, default=lambda value: value.isoformat()) for part in (messages, tools))


@pytest.mark.parametrize(("value", "number"), [("9.50", "9.5"), ("12", "12"), ("1E+2", "100")])
def test_decimals_are_rendered_as_numbers(value, number):
    assert ChatTemplate("{{ tools | tojson }}").render([], tools=[Decimal(value)]) == f"[{number}]"


@pytest.mark.parametrize(
    "value",
    [b"ab", Decimal("NaN"), timedelta(1), {1}, np.int64(3), np.zeros(2), object()],
    ids=lambda value: type(value),
)
def test_types_that_json_lacks_are_refused_with_their_place(value):
    name = type(value).__name__
    calls = [{"function": {"name": "f", "arguments": {"raw": value}}}]
    with pytest.raises(TuneError, match=rf"messages\[1\]\.tool_calls\[0\]\.function\.arguments\.raw .*{name}"):
        ChatTemplate(DUMPED).render([{"role": "user"}, {"role": "assistant", "tool_calls": calls}])
    with pytest.raises(TuneError, match=rf"tools\[0\]\.x .*{name}"):
        ChatTemplate(DUMPED).render([], tools=[{"x": value}])


@pytest.mark.parametrize(
    "expression",
    ["m.role", "m.absent is defined", "m.items() | list", "m.get('role')", "m.pop('role')", "m.__class__",
     "m.role.upper()", "m.role.absent is defined", "m.role.format()", "'{0.__class__}'.format(m)", "m.role.__class__",
     "m.absent.x"],
)  # fmt: skip
def test_attributes_are_those_of_the_plain_sandbox(expression):
    """The short way to a message's keys and a text's methods gives what the sandbox gives, and refuses the same."""

    def outcome(render):
        try:
            return render()
        except Exception as error:
            return str(error)

    message, source = (
        {"role": "user", "content": "Hi"},
        f"{{% for m in messages %}}{{{{ {expression} }}}}{{% endfor %}}",
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = outcome(lambda: plain.from_string(source).render(messages=[message]))
    assert expected in outcome(lambda: ChatTemplate(source).render([message]))
