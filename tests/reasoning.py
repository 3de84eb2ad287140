"""Conversations whose answers have reasoning, and a chat template that drops it from earlier answers."""

# Like Qwen 3's: it drops the reasoning of answers before the last question.
DROPS_REASONING = """\
{%- set last = namespace(question=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > last.question %}
        {{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def ask(text):
    return {"role": "user", "content": text}


def think(thought, answer, **more):
    return {"role": "assistant", "content": answer, "reasoning_content": thought, **more}
