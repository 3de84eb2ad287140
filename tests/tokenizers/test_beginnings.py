"""All beginnings of a conversation are rendered at once, with the texts, spans and errors of one rendering for each."""

import os
import re
from pathlib import Path

import jinja2
import pytest
from reasoning import DROPS_REASONING
from spans_one_by_one import require_asked as require_asked_by_itself
from spans_one_by_one import supervised_spans as spans_one_by_one
from template_cases import RESULT_INSIDE, TEMPLATES, UNUSUAL, conversations, reasoning

from tune.tokenizers import ChatTemplate, supervised_spans
from tune.tokenizers.beginnings import Beginnings, of_template
from tune.tokenizers.chat_template import SHIPPED, chosen_template
from tune.tokenizers.supervision import require_asked

# The templates of fetch_real.py, if they are there.
REAL = Path(os.environ.get("TUNE_REAL_TOKENIZERS", "no such folder")).expanduser() / "templates"
SOURCES = {
    **TEMPLATES,
    **UNUSUAL,
    **{f"shipped {name}": chosen_template(name) for name in SHIPPED},
    **{f"real {file.stem}": file.read_text(encoding="utf-8") for file in sorted(REAL.glob("*.jinja"))},
    "drops reasoning": DROPS_REASONING,
    "result inside": RESULT_INSIDE,
    "opened": reasoning("'<think>\n'", "", "<think>\n</think>\n"),
    "switched": reasoning("'<think></think>' if enable_thinking is false else '<think>\n'", "", "<think></think>"),
}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = re.compile("<s>|</s>|<\\|\\w+\\|>|<[|\uff5c][^|\uff5c<>\\s]+[|\uff5c]>|<\\w+_of_\\w+>|<turn\\|>")


TWO_TURNS = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "One"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "Two"},
]


def attempt(function, *arguments, **options):
    """Return what the function returns, or the type and message of its error."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        return type(error), str(error)


@pytest.fixture
def renders(monkeypatch) -> list[str]:
    """Return a list that every rendering of a template grows by one."""
    names = []
    compiled = jinja2.Template.from_code.__func__

    def from_code(cls, *arguments, **options):
        template = compiled(cls, *arguments, **options)
        render = template.root_render_func

        def counted(context):
            names.append(template.name)
            return render(context)

        template.root_render_func = counted
        return template

    monkeypatch.setattr(jinja2.Template, "from_code", classmethod(from_code))
    return names


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_spans_and_errors_match_the_reference(source):
    template = ChatTemplate(source, VARIABLES)
    for messages, tools in conversations(8):
        expected = attempt(spans_one_by_one, template, messages, ENDS, tools)
        assert attempt(supervised_spans, template, messages, ENDS, tools) == expected, messages


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_beginning_is_its_own_rendering(source):
    """Also its spans, and whether it is what the model is asked, for each answer on its own."""
    template = ChatTemplate(source, VARIABLES)
    for messages, tools in conversations(4, seed=1):
        shown = [of_template(message) for message in messages]
        beginnings = Beginnings(template, messages, tools)
        for end in range(1, len(messages) + 1):
            for prompt in (False, True):
                expected = attempt(template.render_with_spans, shown[:end], prompt, tools=tools)
                assert attempt(beginnings.render_with_spans, end, prompt) == expected
            if messages[end - 1]["role"] != "assistant":
                continue
            part = [*({**message, "train": False} for message in shown[: end - 1]), shown[end - 1]]
            expected = attempt(spans_one_by_one, template, part, ENDS, tools)
            actual = attempt(supervised_spans, template, part, ENDS, tools, Beginnings(template, messages, tools))
            assert actual == expected
            assert attempt(supervised_spans, template, part, ENDS, tools, beginnings) == expected
            text = expected[0]
            if isinstance(text, str):
                expected = attempt(require_asked_by_itself, template, part, text, tools)
                assert attempt(require_asked, beginnings, part, text) == expected


STEPWISE = ["chatml", "llama3", "plain", "slice", "role before", "with tools", "reads the content", "shipped gemma",
            "shipped mistral"]  # fmt: skip


@pytest.mark.parametrize("name", STEPWISE)
def test_number_of_renderings_does_not_grow_with_the_conversation(name, renders):
    def renderings(turns: int) -> int:
        template = ChatTemplate(SOURCES[name], VARIABLES)
        renders.clear()
        _, spans = supervised_spans(template, TWO_TURNS[:2] * turns, ENDS)
        assert len(spans) == turns
        return len(renders)

    assert renderings(200) == renderings(2) == 2


def test_one_answer_needs_two_renderings(renders):
    template = ChatTemplate(SOURCES["chatml"], VARIABLES)
    renders.clear()
    supervised_spans(template, TWO_TURNS[:2], ENDS)
    assert len(renders) == 2


def test_conversation_that_starts_with_an_answer_needs_three_renderings(renders):
    template = ChatTemplate(SOURCES["chatml"], VARIABLES)
    renders.clear()
    supervised_spans(template, TWO_TURNS[1:] * 100, ENDS)
    assert len(renders) == 3


@pytest.mark.parametrize("name", ["last", "looks ahead", "number after", "last role after", "macro after", "recursive"])
def test_templates_that_show_no_beginnings(name):
    """Their texts after a message depend on the messages after it, or cannot be observed."""
    steps = ChatTemplate(SOURCES[name], VARIABLES).render_in_steps(TWO_TURNS)
    assert steps is None or {steps.beginning(end) for end in (1, 2, 3)} == {None}
