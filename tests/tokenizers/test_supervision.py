"""The assistant's words and the token that ends them are learned, and nothing else is."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tune.errors import TuneError
from tune.tokenizers import ChatTemplate, supervised_spans

SPECIAL = re.compile(r"<s>|</s>|<\|\w+\|>")
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def pieces(source, messages):
    text, spans = supervised_spans(ChatTemplate(source, VARIABLES), messages, SPECIAL)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "chatml": ["One<|im_end|>", "Two <|im_end|>"],
        "chatml-generation": ["One<|im_end|>", "Two <|im_end|>"],
        "llama3": ["One<|eot_id|>", "Two<|eot_id|>"],
        "thinking": ["One<|im_end|>", "<think>\n\n</think>\n\nTwo <|im_end|>"],
        "instruct": [" One</s>", " Two </s>"],
        "eos-at-the-end": ["One<|im_end|>", "Two <|im_end|>\n</s>"],
        "plain": ["One\n", "Two \n"],
    }.items(),
)
def test_what_is_learned_of_two_turns(templates, name, expected):
    assert pieces(templates[name], [user("1?"), assistant("One"), user("2?"), assistant("Two ")]) == expected


def test_reasoning_that_the_template_removes_is_not_learned(templates):
    messages = [
        user("1?"),
        assistant("<think>\nhm\n</think>\n\nOne"),
        user("2?"),
        assistant("<think>\nso\n</think>\n\n2"),
    ]
    assert pieces(templates["thinking"], messages) == ["One<|im_end|>", "<think>\nso\n</think>\n\n2<|im_end|>"]


def test_text_that_looks_like_the_template_does_not_mislead_it(templates):
    trick = "a<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    messages = [user(trick), assistant(trick), user(trick), assistant("c")]
    expected = [trick + "<|im_end|>", "<think>\n\n</think>\n\nc<|im_end|>"]
    assert pieces(templates["thinking"], messages) == expected


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4))
def test_the_answers_are_learned_and_the_questions_are_not(templates, any_template, turns):
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    thinks = any_template == templates["thinking"]
    trims = any_template == templates["llama3"]
    template = ChatTemplate(any_template, VARIABLES)
    text, spans = supervised_spans(template, messages, SPECIAL)
    assert len(spans) == len(turns)
    assert text == template.render(messages)
    for index, ((_, answer), (start, end)) in enumerate(zip(turns, spans, strict=True)):
        learned = text[start:end].removeprefix("<think>\n\n</think>\n\n" if thinks and index == len(turns) - 1 else "")
        expected = answer.strip() if trims else answer
        assert learned.lstrip(" ").startswith(expected.lstrip(" "))
        assert len(learned) - len(expected) <= len("<|im_end|>\n</s>")
    rest = "".join(text[start:end] for start, end in gaps(spans, len(text)))
    for question, _ in turns:
        assert (question.strip() if trims else question) in rest


def gaps(spans, length):
    borders = [0, *(border for span in spans for border in span), length]
    return zip(borders[::2], borders[1::2], strict=True)


def test_train_false_leaves_a_turn_out(templates):
    messages = [user("1?"), assistant("One", train=False), user("2?"), assistant("Two", train=True)]
    for name in ("chatml", "chatml-generation"):
        assert pieces(templates[name], messages) == ["Two<|im_end|>"]


def test_train_is_not_shown_to_the_template():
    template = "{% for m in messages %}{{ m | tojson }}|{% endfor %}"
    assert pieces(template, [user("a"), assistant("b", train=True)]) == ['{"role": "assistant", "content": "b"}|']


def test_answers_in_a_row_and_empty_answers(templates):
    messages = [user("a"), assistant("b"), assistant(""), assistant("c")]
    assert pieces(templates["chatml"], messages) == ["b<|im_end|>", "<|im_end|>", "c<|im_end|>"]


def test_tool_calls_are_learned_and_their_results_are_not(templates):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    messages = [user("a"), call, {"role": "tool", "content": "42"}, assistant("It is 42.")]
    expected = ['{"name": "f", "parameters": {"x": 1}}<|eot_id|>', "It is 42.<|eot_id|>"]
    assert pieces(templates["llama3"], messages) == expected


def test_template_whose_generation_prompt_says_what_no_answer_says():
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ 'bot:' if add_generation_prompt }}"
    with pytest.raises(TuneError, match=r"message 2 starts or ends elsewhere.*'user:a;bot:'.*'user:a;assistant:b;'"):
        pieces(template, [user("a"), assistant("b")])


def test_template_that_rewrites_earlier_turns_beyond_recognition():
    template = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}<|im_end|>{% endfor %}"
    with pytest.raises(TuneError, match="generation %"):
        pieces(template, [user("A"), assistant("b"), user("C"), assistant("d")])


def test_train_false_with_generation_blocks_that_are_not_the_messages():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}!{% endgeneration %}"
    with pytest.raises(TuneError, match="has 1 for 2 messages"):
        pieces(template, [user("a"), assistant("b"), assistant("c", train=False)])
