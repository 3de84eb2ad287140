"""Turns of an environment with templates that rewrite answers, require calls, or end turns with the next header."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from generation.test_rollout import Scripted

from tune import distributed
from tune.datasets import Prompt
from tune.errors import TuneError
from tune.generation import rollout, statistics
from tune.generation.turns import answered, assistant_message, text_behind
from tune.tokenizers import ChatTemplate, Tokenizer

REAL = Path(os.environ.get("TUNE_REAL_TOKENIZERS", "no such folder")).expanduser()
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]
QUESTION = [{"role": "user", "content": "1 + 2?"}]

# Like the templates of the families, as far as turns are concerned.
QWEN3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    '<|start|>assistant<|end|>{"name": "f", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot|>'
    "{% elif m.role == 'tool' %}<|start|>ipython<|end|>{{ m.content | tojson }}<|eot|>"
    "{% else %}<|start|>{{ m.role }}<|end|>{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>{% endif %}"
)
MISTRAL = (
    "{% set turn = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (turn.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set turn.n = turn.n + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
IGNORES_TOOLS = (
    "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MORE, RESULT = {"role": "user", "content": "More"}, {"role": "tool", "content": "4"}


@pytest.mark.parametrize("text_end", [True, False], ids=["a token", "a stop string"])
@pytest.mark.parametrize(
    ("template", "message", "end", "after"),
    [
        (QWEN3, MORE, "<|im_end|>", "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"),
        (
            QWEN3,
            RESULT,
            "<|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (LLAMA3, MORE, "<|eot|>", "<|start|>user<|end|>More<|eot|><|start|>assistant<|end|>"),
        (LLAMA3, RESULT, "<|eot|>", '<|start|>ipython<|end|>"4"<|eot|><|start|>assistant<|end|>'),
        (MISTRAL, MORE, "</s>", "[INST]More[/INST]"),
        (MISTRAL, RESULT, "</s>", "[TOOL_RESULTS]4 c00010000[/TOOL_RESULTS]"),
        (GLM, MORE, "<|user|>", "\nMore<|assistant|>\n"),
        (GLM, RESULT, "<|observation|>", "\n4<|assistant|>\n"),
    ],
)
def test_text_after_an_answer(template, message, end, after, text_end):
    """After a stop string, the template ends the turn. The two sampled calls are not rendered."""
    calls = '[TOOL_CALLS][{"name": "add", "arguments": {"a": "<|eot|>"}}, {"name": "add", "parameters": {}}]'
    answer = assistant_message(calls, TOOLS, 1)
    assert len(answer["tool_calls"]) == 2
    stops = ["<|im_end|>", "<|eot|>", "</s>", "<|user|>", "<|observation|>"]
    render = partial(ChatTemplate(template).render, tools=TOOLS)
    text = text_behind(render, QUESTION, answered(answer, [message]), stops, end if text_end else None)
    assert text == (after if text_end else end + after)


def test_template_that_omits_tool_results_is_refused():
    """Otherwise the model would be asked the same again without seeing the result."""
    render = ChatTemplate(IGNORES_TOOLS).render
    turn = answered(assistant_message("add", None, 1), [RESULT])
    with pytest.raises(TuneError, match=r"environment: .* the chat template"):
        text_behind(render, QUESTION, turn, ["<|eot|>"], "<|eot|>")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<think>\n{}\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', [("f", {"x": 1})]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n' * 2, [("f", {}), ("f", {})]),
        ('{"name": "f", "parameters": {"x": [1]}}', [("f", {"x": [1]})]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}]', [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {</tool_call>', []),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
        ('{"name": "Ada"}', []),
        ("[TOOL_CALLS]" + "[" * 100_000, []),
        ("Three.", []),
    ],
)
def test_tool_calls_are_parsed_from_an_answer(text, calls):
    message = assistant_message(text, TOOLS, 3)
    assert message["content"] == text
    parsed = message.get("tool_calls", [])
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in parsed] == calls
    assert len({call["id"] for call in parsed}) == len(parsed) and all(len(call["id"]) == 9 for call in parsed)
    assert "tool_calls" not in assistant_message(text, None, 3)  # without tools, the answer is plain JSON


class Calculator:
    """A tool; `heard` are the messages received in all episodes."""

    heard: list = []  # noqa: RUF012

    def start(self, row):
        return [{"role": "user", "content": f"Use add, please, {row['name']}."}] if row["name"] else None

    def step(self, message):
        self.heard.append(message)
        calls = message.get("tool_calls", [])
        return 0.5, [{"role": "tool", "content": "3"} for _ in calls], not calls


def tokenizer_of(checkpoint, folder, template, tokens):
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(str(folder))
    tokenizer.add_tokens(tokens)
    return tokenizer


@pytest.mark.parametrize(
    ("template", "name", "call"),
    [
        (QWEN3, "Ada", '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'),
        (LLAMA3.replace("<|eot|>", "<|im_end|>"), "Ada", '<|python_tag|>{"name": "add", "parameters": {}}'),
        (MISTRAL.replace("</s>", "<|im_end|>"), None, '[TOOL_CALLS][{"name": "add", "arguments": {}}]'),
    ],
)
def test_tool_in_an_environment(template, name, call, checkpoint, tmp_path):
    """Sampled text is kept even if the template would rewrite it, and the environment sees special tokens that start a
    call. Messages returned by `start` follow the prompt."""
    tokens = ["[INST]", "[/INST]", "[TOOL_CALLS]", "<|python_tag|>", "<|start|>", "<|end|>"]
    tokenizer = tokenizer_of(checkpoint, tmp_path / "model", template, tokens)
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    prompt = Prompt(0, tokenizer.encode(text), {"name": name}, QUESTION, TOOLS)
    sampled = [tokenizer.encode(text + "<|im_end|>") for text in (call, "<think>\n3!\n</think>\n\n3")]
    Calculator.heard.clear()
    sampler, world = Scripted(*[(tokens, "stop") for tokens in sampled]), distributed.init("cpu")
    ((episode,),) = rollout(
        None, sampler, tokenizer, [prompt], [], world, samples=1, step=1, environment=Calculator, max_turns=3
    )
    asked = [*QUESTION, *({"role": "user", "content": f"Use add, please, {user}."} for user in [name] if user)]
    assert tokenizer.decode(episode.prompt.tokens) == tokenizer.apply_chat_template(asked, True, tools=TOOLS)
    assert sampler.prompts[0][0] == episode.prompt.tokens
    first, last = sampled
    assert episode.tokens[: len(first)] == first and episode.tokens[-len(last) :] == last
    between = tokenizer.decode(episode.tokens[len(first) : -len(last)])
    assert "3" in between and call not in between and (template != QWEN3 or "<think>" not in between)
    assert [message["content"] for message in Calculator.heard] == [call, "<think>\n3!\n</think>\n\n3"]
    assert Calculator.heard[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    assert episode.rewards == {"environment": 1.0}
    assert statistics([[episode]], [], Calculator)["reward/environment"].tolist() == [1.0, 1.0]
    assert statistics([], [], Calculator)["reward/environment"].tolist() == [0.0, 0.0]  # for a process without prompts


@pytest.mark.parametrize("messages", ["Use add.", [3], [{"role": "use", "content": ""}]])
def test_start_must_return_messages(messages, checkpoint):
    class Wrong(Calculator):
        def start(self, row):
            return messages

    tokenizer = Tokenizer(str(checkpoint))
    prompt = Prompt(0, tokenizer.encode("a"), {}, QUESTION)
    with pytest.raises(TuneError, match="environment: the result of start"):
        rollout(
            None, Scripted(), tokenizer, [prompt], [], distributed.init("cpu"), samples=1, step=1, environment=Wrong
        )


def test_start_that_leaves_no_room_ends_the_episode(checkpoint):
    tokenizer = Tokenizer(str(checkpoint))
    prompt = Prompt(0, tokenizer.encode("a"), {"name": "Ada" * 50}, QUESTION)
    sampler = Scripted()
    sampler.longest = 100
    world = distributed.init("cpu")
    ((episode,),) = rollout(
        None, sampler, tokenizer, [prompt], [], world, samples=1, step=1, environment=Calculator, max_turns=2
    )
    assert (episode.finish, episode.tokens, episode.reward) == ("room", [], 0.0)
    assert (episode.sample(1.0).labels == -100).all()


ENDS = {"qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "gptoss": "<|call|>", "glm4moe": "<|observation|>"}
ENDS["gemma4"] = "<|tool_response>"


@pytest.mark.skipif(not REAL.exists(), reason="TUNE_REAL_TOKENIZERS names no folder filled by fetch_real.py")
@pytest.mark.parametrize(("name", "end"), ENDS.items())
def test_tools_of_real_templates(name, end):
    """The text after a call matches the text after the same call in a whole conversation."""
    template = ChatTemplate((REAL / "templates" / f"{name}.jinja").read_text(), {"bos_token": "<s>", "eos_token": end})
    render = partial(template.render, tools=TOOLS)
    turn = answered(assistant_message('<tool_call>{"name": "add", "arguments": {}}', TOOLS, 1), [RESULT, RESULT])
    whole = render([*QUESTION, *turn], add_generation_prompt=True)
    after = text_behind(render, QUESTION, turn, [end], end)
    assert whole.endswith(end + after) and after.count("4") == 2


@pytest.mark.skipif(not REAL.exists(), reason="TUNE_REAL_TOKENIZERS names no folder filled by fetch_real.py")
def test_conversation_with_the_real_qwen3_tokenizer():
    tokenizer = Tokenizer(str(REAL / "qwen3"))
    prompt = Prompt(0, tokenizer.encode("a"), {"name": "Ada"}, QUESTION, TOOLS)
    call = f"<think>\nhm\n</think>\n\n<tool_call>\n{json.dumps({'name': 'add', 'arguments': {}})}\n</tool_call>"
    sampled = [tokenizer.encode(text + "<|im_end|>") for text in (call, "<think>\n\n</think>\n\n3")]
    sampler, world = Scripted(*[(tokens, "stop") for tokens in sampled]), distributed.init("cpu")
    ((episode,),) = rollout(
        None, sampler, tokenizer, [prompt], [], world, samples=1, step=1, environment=Calculator, max_turns=3
    )
    expected = (
        f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(episode.tokens) == f"{expected}<think>\n\n</think>\n\n3<|im_end|>"
