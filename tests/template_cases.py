"""Chat templates that write conversations in many ways, and random conversations for them."""

import random
from collections.abc import Iterator

from sample_texts import TOOLS

CHATML = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_WITH_GENERATION = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=2) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Like Qwen 3: only the last answer keeps its reasoning, or gets an empty block if it has none.
THINKING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.last %}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif %}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

INSTRUCT = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Like Phi 3: EOS follows the conversation, not each turn.
EOS_AT_THE_END = """\
{%- for message in messages %}{{- '<|im_start|>' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>' }}{%- else %}{{- eos_token }}{%- endif %}"""

PLAIN = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "chatml-generation": CHATML_WITH_GENERATION,
    "llama3": LLAMA3,
    "thinking": THINKING,
    "instruct": INSTRUCT,
    "eos-at-the-end": EOS_AT_THE_END,
    "plain": PLAIN,
}

# Gemma 4: a tool's result is part of the turn that called it and precedes the text of that turn.
RESULT_INSIDE = (
    "{% for m in messages if m.role != 'tool' %}<|turn|>{{ m.role + '\n' }}"
    "{% if m.tool_calls %}<|call|>{{ m.tool_calls[0].function.name }}<|result|>"
    "{% for r in messages if r.role == 'tool' %}{{ r.content }}<|done|>{% endfor %}{% endif %}"
    "{{ m.content }}{% if m.content or not m.tool_calls %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and (not messages or messages[-1].role != 'tool') %}<|turn|>assistant\n{% endif %}"
)


def reasoning(prompt: str, past: str, last: str) -> str:
    """ChatML of a reasoning model: the text that starts the generation prompt, past answers and the last answer."""
    return (
        "{% set asked = namespace(last=0) %}"
        "{% for m in messages if m.role == 'user' %}{% set asked.last = asked.last + 1 %}{% endfor %}"
        "{% set seen = namespace(n=0) %}"
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
        "{% if m.role == 'user' %}{% set seen.n = seen.n + 1 %}"
        f"{{% else %}}{{{{ {last!r} if seen.n == asked.last else {past!r} }}}}{{% endif %}}"
        "{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' + ({prompt}) }}}}{{% endif %}}"
    )


HEADER = "<|im_start|>{{ m.role + '\\n' }}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = HEADER + "{{ m.content }}<|im_end|>{{ '\\n' }}"

# Templates whose text of a beginning is not always the beginning of the text, each for another reason.
UNUSUAL = {
    "last": f"{{% for m in messages %}}{TURN}{{% if loop.last %}}!{{% endif %}}{{% endfor %}}{PROMPT}",
    "last of tools": (
        f"{{% for m in messages %}}{TURN}{{% if m.role == 'tool' and loop.last %}}!{{% endif %}}{{% endfor %}}{PROMPT}"
    ),
    "prompt inside the loop": (
        f"{{% for m in messages %}}{TURN}"
        "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% endfor %}"
    ),
    "prompt known before": f"{{{{ add_generation_prompt }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "looks ahead": f"{{% for b in messages | batch(1) %}}{{% for m in b %}}{TURN}{{% endfor %}}{{% endfor %}}{PROMPT}",
    "pairs": f"{{% for b in messages | batch(2) %}}{{% for m in b %}}{TURN}{{% endfor %}}{{% endfor %}}{PROMPT}",
    "looks ahead under another name": (
        "{% set rows = messages | batch(1) %}"
        f"{{% for b in rows %}}{{% for m in b %}}{TURN}{{% endfor %}}{{% endfor %}}{PROMPT}"
    ),
    "selected": f"{{% for m in messages | rejectattr('role', 'eq', 'tool') %}}{TURN}{{% endfor %}}{PROMPT}",
    "not the last": f"{{% for m in messages if m != messages[-1] %}}{TURN}{{% endfor %}}{PROMPT}",
    "number": f"{{{{ messages | length }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "number after": f"{{% for m in messages %}}{TURN}{{% endfor %}}{{{{ messages | length }}}}{PROMPT}",
    "number in the loop": f"{{% for m in messages %}}{{{{ loop.length }}}}{TURN}{{% endfor %}}{PROMPT}",
    "counts down": f"{{% for m in messages %}}{TURN}{{{{ loop.revindex }}}}{{% endfor %}}{PROMPT}",
    "is sequence": f"{{{{ messages is sequence }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "has a method": f"{{{{ messages.copy is defined }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "is equal": f"{{{{ messages == messages[:2] }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "contains": f"{{{{ messages[0] in messages }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "printed": f"{{{{ messages }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "as JSON": f"{{{{ messages | tojson }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "last role after": (
        f"{{% for m in messages %}}{TURN}{{% endfor %}}"
        f"{{% if messages[-1].role == 'user' %}}{PROMPT}{{% endif %}}"
    ),
    "alias after": (
        f"{{% set rows = messages %}}{{% for m in messages %}}{TURN}{{% endfor %}}{{{{ rows | last }}}}{PROMPT}"
    ),
    "counts questions": (
        "{% set seen = namespace(n=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set seen.n = seen.n + 1 %}{% endif %}"
        f"{TURN}{{% endfor %}}{{{{ seen.n }}}}{PROMPT}"
    ),
    "macro after": (
        "{% macro ending() %}{{ messages | length }}{% endmacro %}"
        f"{{% for m in messages %}}{TURN}{{% endfor %}}{{{{ ending() }}}}{PROMPT}"
    ),
    "two loops": (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        f"{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}"
    ),
    "loop after": (
        f"{{% for m in messages %}}{TURN}{{% endfor %}}{{% for t in [1, 2] %}}{{{{ t }}}}{{% endfor %}}{PROMPT}"
    ),
    "break": (
        "{% for m in messages %}{% if loop.index0 == 4 %}{% break %}{% endif %}" + TURN + "{% endfor %}" + PROMPT
    ),
    "continue": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}" + TURN + "{% endfor %}" + PROMPT
    ),
    "else": f"{{% for m in messages[1:] %}}{TURN}{{% else %}}nothing{{% endfor %}}{PROMPT}",
    "next item": (
        f"{{% for m in messages %}}{TURN}"
        "{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}>{% endif %}{% endfor %}" + PROMPT
    ),
    "changed": f"{{% for m in messages %}}{{{{ loop.changed(m.role) }}}}{TURN}{{% endfor %}}{PROMPT}",
    "recursive": f"{{% for m in messages recursive %}}{TURN}{{% endfor %}}{PROMPT}",
    "alternates": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}" + PROMPT
    ),
    "at most four": (
        "{% for m in messages %}{% if loop.index > 4 %}{{ raise_exception('too many') }}{% endif %}"
        + TURN + "{% endfor %}" + PROMPT
    ),
    "ends with EOS": (
        f"{{% for m in messages %}}{TURN}{{% endfor %}}{{{{ '' if add_generation_prompt else '</s>' }}}}{PROMPT}"
    ),
    "slice": (
        "{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}{% set rows = messages[1:] %}"
        "{% else %}{% set rows = messages %}{% endif %}"
        f"{{% for m in rows %}}{TURN}{{% endfor %}}{PROMPT}"
    ),
    "role before": (
        "{% for m in messages %}{% if loop.index0 and messages[loop.index0 - 1].role == 'tool' %}<{% endif %}"
        + TURN + "{% endfor %}" + PROMPT
    ),
    "reads the content": (
        "{% for m in messages %}" + HEADER
        + "{% if m.content and '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip() }}"
        "{% else %}{{ m.content | trim }}{% endif %}<|im_end|>\n{% endfor %}" + PROMPT
    ),
    "with tools": (
        "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}" + HEADER + "{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name + c.function.arguments.place }}{% endfor %}"
        "<|im_end|>\n{% endfor %}" + PROMPT
    ),
    "opens reasoning": (
        f"{{% for m in messages %}}{TURN}{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is not false %}<think>\n{% endif %}"
        "{% endif %}"
    ),
    "marked": (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    ),
    "marked, with a switch": (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' %}<think></think>{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant "
        "{% if thinking is false %}<think></think>{% endif %}{% endif %}"
    ),
    "marked, last only": (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' and loop.last %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}" + PROMPT
    ),
}  # fmt: skip

CONTENTS = [
    "", "Hi", " leading", "trailing \n", "\n\n", "two\nlines", "<|im_end|>", "<|im_start|>assistant\n", "</s>",
    "<think>\nhm\n</think>\n\nanswer", "<think>", "</think>", "a </think> b", "assistant: ", "größer 🦊", "word " * 9,
]  # fmt: skip


def conversations(number: int, seed: int = 0) -> Iterator[tuple[list[dict], list[dict] | None]]:
    """Messages and tools. Messages may be set not to be learned."""
    draw = random.Random(seed)
    for index in range(number):
        tools = draw.choice([None, None, TOOLS])
        messages = []
        if draw.random() < 0.4:
            messages.append({"role": draw.choice(["system", "system", "developer"]), "content": draw.choice(CONTENTS)})
        if draw.random() < 0.1:
            messages.append(_answer(draw))
        for _ in range(draw.randint(1, 6)):
            messages.append({"role": "user", "content": draw.choice(CONTENTS)})
            if draw.random() < 0.3:
                messages += _call(draw, f"call{index:05d}")
            if draw.random() < 0.95:
                messages.append(_answer(draw))
        if draw.random() < 0.2:
            messages.pop()
        if any(message["role"] == "assistant" for message in messages):
            yield messages, tools


def _answer(draw: random.Random) -> dict:
    answer = {"role": "assistant", "content": draw.choice(CONTENTS)}
    if draw.random() < 0.3:
        answer["reasoning_content"] = draw.choice(CONTENTS)
    if draw.random() < 0.2:
        answer["train"] = draw.random() < 0.3
    return answer


def _call(draw: random.Random, name: str) -> list[dict]:
    call = {"name": "weather", "arguments": {"place": draw.choice(CONTENTS), "days": 3}}
    said = draw.choice([{}, {"content": ""}, {"content": "Let me see."}])
    calls = {"role": "assistant", **said, "tool_calls": [{"id": name, "type": "function", "function": call}]}
    result = {"role": "tool", "name": "weather", "tool_call_id": name, "content": draw.choice(CONTENTS)}
    return [calls, *[result] * draw.choice([1, 1, 2])]
