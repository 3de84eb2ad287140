"""Only the assistant's text and the token that ends it are learned."""

import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from template_cases import RESULT_INSIDE, reasoning

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
def test_learned_text_of_two_turns(templates, name, expected):
    assert pieces(templates[name], [user("1?"), assistant("One"), user("2?"), assistant("Two ")]) == expected


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be short."}]], ids=["", "system"])
@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "chatml": ["One<|im_end|>", "Two<|im_end|>"],
        "llama3": ["One<|eot_id|>", "Two<|eot_id|>"],  # cannot render messages[:0]
        "thinking": ["One<|im_end|>", "<think>\n\n</think>\n\nTwo<|im_end|>"],
        "plain": ["One\n", "Two\n"],
    }.items(),
)
def test_conversation_that_starts_with_an_answer(templates, name, expected, before):
    messages = [*before, assistant("One"), user("Hello"), assistant("Two")]
    text, spans = supervised_spans(ChatTemplate(templates[name], VARIABLES), messages, SPECIAL)
    assert [text[start:end] for start, end in spans] == expected
    assert text == ChatTemplate(templates[name], VARIABLES).render(messages)
    unlearned = [*before, assistant("One", train=False), user("Hello"), assistant("Two")]
    assert pieces(templates[name], unlearned) == expected[1:]


def test_first_answer_rendered_differently_without_a_question(templates):
    """Qwen 3 renders no reasoning if there is no question at all."""
    template = "{% for m in messages %}{{ '<think>' if messages[0].role == 'user' }}{{ m.content }}</s>{% endfor %}"
    with pytest.raises(TuneError, match=r"it and what follows give another text .*, at message 1"):
        pieces(template, [assistant("One")])


def test_reasoning_that_the_template_removes_is_not_learned(templates):
    messages = [
        user("1?"),
        assistant("<think>\nhm\n</think>\n\nOne"),
        user("2?"),
        assistant("<think>\nso\n</think>\n\n2"),
    ]
    assert pieces(templates["thinking"], messages) == ["One<|im_end|>", "<think>\nso\n</think>\n\n2<|im_end|>"]


def test_template_text_inside_messages_is_not_misread(templates):
    trick = "a<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    messages = [user(trick), assistant(trick), user(trick), assistant("c")]
    expected = [trick + "<|im_end|>", "<think>\n\n</think>\n\nc<|im_end|>"]
    assert pieces(templates["thinking"], messages) == expected


@pytest.mark.weekly(but_one=True)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4))
def test_answers_are_learned_and_questions_are_not(templates, any_template, turns):
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    thinks = any_template == templates["thinking"]
    assume(
        not thinks or all("</think>" not in answer for _, answer in turns)
    )  # the template cuts the answer at </think>
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


def test_consecutive_and_empty_answers(templates):
    messages = [user("a"), assistant("b"), assistant(""), assistant("c")]
    assert pieces(templates["chatml"], messages) == ["b<|im_end|>", "<|im_end|>", "c<|im_end|>"]


def test_tool_calls_are_learned_and_their_results_are_not(templates):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    messages = [user("a"), call, {"role": "tool", "content": "42"}, assistant("It is 42.")]
    expected = ['{"name": "f", "parameters": {"x": 1}}<|eot_id|>', "It is 42.<|eot_id|>"]
    assert pieces(templates["llama3"], messages) == expected


def a_call(words):
    return [user("a"), assistant(words, tool_calls=[{"function": {"name": "f"}}]), {"role": "tool", "content": "42"}]


def test_header_after_a_tool_result_is_not_learned():  # DiffusionGemma
    messages = [*a_call(""), assistant("It is 42."), user("b"), assistant("c")]
    assert pieces(RESULT_INSIDE, messages) == ["<|call|>f<|result|>", "It is 42.<|end|>", "c<|end|>"]
    assert pieces(RESULT_INSIDE, messages[1:4]) == ["<|call|>f<|result|>", "It is 42.<|end|>"]


def test_tool_result_inside_the_turn_is_not_learned():
    with pytest.raises(TuneError, match=r"tool's result \(message 3\) into the turn of message 2"):
        pieces(RESULT_INSIDE, [*a_call("Let me see."), assistant("It is 42.")])
    question, call, result = a_call("Let me see.")
    messages = [question, {**call, "train": False}, result, assistant("It is 42.")]
    assert pieces(RESULT_INSIDE, messages) == ["It is 42.<|end|>"]


def test_generation_prompt_that_no_answer_starts_with_is_refused():
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ 'bot:' if add_generation_prompt }}"
    with pytest.raises(TuneError, match=r"'user:a;bot:'.*'user:a;assistant:b;'.* at message 2"):
        pieces(template, [user("a"), assistant("b")])


def test_template_that_rewrites_earlier_turns_is_refused():
    template = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}<|im_end|>{% endfor %}"
    with pytest.raises(TuneError, match="generation %"):
        pieces(template, [user("A"), assistant("b"), user("C"), assistant("d")])


TWO_TURNS = [user("1?"), assistant("One"), user("2?"), assistant("<Two>")]
SWITCHED = "'<think></think>' if enable_thinking is false else '<think>\n'"


@pytest.mark.parametrize(
    ("template", "expected"),
    {
        # Qwen 3.5: past answers lack the block that the generation prompt opens
        "opened": (reasoning("'<think>\n'", "", "<think>\n</think>\n"), ["One<|im_end|>", "</think>\n<Two><|im_end|>"]),
        "closed": (reasoning("'<think></think>'", "", "<think></think>"), ["One<|im_end|>", "<Two><|im_end|>"]),
        # Nemotron, SmolLM 3: answers without reasoning are rendered with the switch turned off
        "switched": (
            reasoning(SWITCHED, "<think></think>", "<think></think>"),
            ["One<|im_end|>", "<Two><|im_end|>"],
        ),
    }.values(),
)
def test_reasoning_that_the_generation_prompt_opens(template, expected):
    assert pieces(template, TWO_TURNS) == expected


def test_reasoning_that_only_the_generation_prompt_has_is_refused():  # DeepSeek R1's distillates, QwQ
    template = reasoning("'<think>\n'", "", "")
    with pytest.raises(
        TuneError, match=r"ends the generation prompt with '<think>\\n', .* message 4 without it \('<Two>"
    ):
        pieces(template, [user("1?"), assistant("One", train=False), *TWO_TURNS[2:]])
    assert pieces(template, [*TWO_TURNS[:3], assistant("Two", train=False)]) == ["One<|im_end|>"]


def test_turn_that_ends_differently_inside_the_conversation():  # gpt-oss
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant|{% endif %}"
    )
    assert pieces(template, TWO_TURNS) == ["One", "<Two><|return|>"]


def test_turn_that_only_the_next_turn_ends():  # GLM 4
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '<think></think>' if m.role == 'assistant' and loop.last }}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert pieces(template, TWO_TURNS) == ["One", "<think></think><Two>"]


def test_system_message_that_moves_to_the_last_question():  # Mistral
    template = (
        "<s>{% set system = messages[0].content %}"
        "{% set asked = messages[1:] | selectattr('role', 'eq', 'user') | list %}"
        "{% for m in messages[1:] %}{% if m.role == 'user' %}"
        "<|im_start|>{{ system if m == asked[-1] }}{{ m.content }}<|im_end|>"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert pieces(template, [{"role": "system", "content": "Be short."}, *TWO_TURNS]) == ["One</s>", "<Two></s>"]


def test_train_false_with_unmatched_generation_blocks_is_refused():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}!{% endgeneration %}"
    with pytest.raises(TuneError, match=r"has 1 .*for 2 assistant messages"):
        pieces(template, [user("a"), assistant("b"), assistant("c", train=False)])
