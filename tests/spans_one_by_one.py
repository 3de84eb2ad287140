"""Slow reference: find the supervised spans of a conversation by rendering each of its beginnings."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from tune.errors import TuneError
from tune.tokenizers.chat_template import ChatTemplate, Message, Span
from tune.tokenizers.supervision import (
    _REASONING,
    _SWITCHES,
    _disagreement,
    _end_of_turn,
    _refusal,
    around_content,
    common_prefix,
)


def supervised_spans(
    template: ChatTemplate,
    messages: list[Message],
    special_tokens: re.Pattern[str],
    tools: list | None = None,
    **variables: Any,
) -> tuple[str, list[Span]]:
    """The rendered conversation, and the character spans of the assistant's turns with their end-of-turn token.

    If the template has `{% generation %}` blocks, they are the spans, as in transformers. Otherwise the turn of message
    i is the text that `messages[:i + 1]` renders in addition to `messages[:i]` with the generation prompt. Messages
    with `train: false` are left out. Raises TuneError if the template does not allow to find the spans.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [index for index in turns if messages[index].get("train", True)]
    messages = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    text, spans = template.render_with_spans(messages, tools=tools, **variables)
    if not template.marks_generation:
        render: Callable[..., str] = partial(template.render, tools=tools, **variables)
        roles = [message["role"] for message in messages]
        first = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), None)
        if first is None or roles[first] != "assistant":
            return text, [_turn_span(render, messages, index, text, special_tokens) for index in trained]

        def render_asked(messages: list[Message], **options: Any) -> str:
            return render([*messages[:first], {"role": "user", "content": "Hello"}, *messages[first:]], **options)

        # Many templates cannot render a conversation without messages before the first answer. With a question added
        # before it, the answer has the same text and the same distance from the end.
        asked = render_asked(messages)
        spans = [_turn_span(render_asked, messages, index, asked, special_tokens) for index in trained]
        if spans and not text.endswith(tail := asked[spans[0][0] :]):
            raise _disagreement(trained[0], "it and what follows", tail, text[-len(tail) :])
        more = len(asked) - len(text)
        return text, [(start - more, end - more) for start, end in spans]
    if trained == turns:
        return text, spans
    if len(spans) != len(turns):
        raise TuneError(
            f"{template.origin} has {len(spans)} generation blocks for {len(turns)} assistant messages. To learn only "
            "some of the messages (train: false, train_on=last, or turns=as_seen), it must have one for each"
        )
    return text, [span for span, index in zip(spans, turns, strict=True) if index in trained]


def require_asked(
    template: ChatTemplate, messages: list[Message], text: str, tools: list | None = None, **variables: Any
) -> None:
    """Raise TuneError unless `text`, the rendered conversation, is how the model is asked for its last message: it
    begins with the messages before it and the generation prompt.

    Only templates with `{% generation %}` blocks need this. Without blocks, `supervised_spans` requires the same.
    """
    if not template.marks_generation or all(each["role"] in ("system", "developer") for each in messages[:-1]):
        return  # an answer before the first question has no generation prompt
    messages = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    before = messages[:-1]
    prompts = [
        template.render(before, add_generation_prompt=True, tools=tools, **variables, **switch)
        for switch in ({}, *_SWITCHES)
    ]
    if not any(map(text.startswith, prompts)):
        at = common_prefix(prompts[0], text)
        raise TuneError(
            f"with turns=as_seen, message {len(messages)} must be learned as the model is asked for it, but "
            f"{template.origin} renders the text before it differently ({text[max(0, at - 20) : at + 30]!r}) than the "
            f"generation prompt ({prompts[0][max(0, at - 20) : at + 30]!r}). Change the template, or set turns=together"
        )


def _turn_span(
    render: Callable[..., str], messages: list[Message], index: int, text: str, special_tokens: re.Pattern[str]
) -> Span:
    """The span of assistant message `index` in `text`, the rendering of all messages."""
    start = _turn_start(render, messages, index, text)
    up_to_here = text if index == len(messages) - 1 else render(messages[: index + 1])
    if text.startswith(up_to_here):
        return start, _end_of_turn(up_to_here, start, special_tokens)

    # The template writes this turn differently if it is the last one (Qwen3 adds an empty <think> block). The end of
    # the turn then follows from the text after its content, which must not depend on the content.
    last, inside = (around_content(render, messages[:end], index) for end in (index + 1, len(messages)))
    if messages[index + 1]["role"] == "tool":
        result = around_content(render, messages, index + 1)
        if result and inside and len(result[0]) < len(inside[0]):
            raise _refusal(
                f"writes the tool's result (message {index + 2}) into the turn of message {index + 1}, where it would "
                "be trained on. Leave text and reasoning out of messages that call tools, or mark"
            )
    if last and inside and text.endswith(inside[1]):
        specials = list(special_tokens.finditer(inside[1], 0, common_prefix(inside[1], last[1])))
        end = len(text) - len(inside[1]) + (specials[-1].end() if specials else 0)
        # If an inner turn ends with another token than the last turn (gpt-oss), or only with the start of the next turn
        # (GLM), the model must not write that ending: only the content is supervised.
        behind = last[1].lstrip()
        others = special_tokens.match(inside[1].lstrip()) and (not behind or special_tokens.match(behind))
        if (specials or others) and end >= start:
            return start, end
    raise _disagreement(index, "the messages up to it", up_to_here, text)


def _turn_start(render: Callable[..., str], messages: list[Message], index: int, text: str) -> int:
    before = messages[:index]
    prompt = render(before, add_generation_prompt=True)
    if text.startswith(prompt):
        # DiffusionGemma opens a turn after a tool's result, but its generation prompt does not. The model must not
        # write this header.
        header = _header(render, before) if before and before[-1]["role"] == "tool" else ""
        written = text.startswith(header, len(prompt)) and not prompt.endswith(header)
        return len(prompt) + (len(header) if written else 0)
    # A template that opens a reasoning block may have a switch that turns reasoning off or closes the block.
    for switch in _SWITCHES:
        switched = render(before, add_generation_prompt=True, **switch)
        if text.startswith(switched):
            return len(switched)
    opened = _REASONING.search(prompt)
    if opened and text.startswith(prompt[: opened.start()]):
        # The template drops reasoning from answers before the last question.
        if any(message["role"] == "user" for message in messages[index + 1 :]):
            return opened.start()
        opening, answer = prompt[opened.start() :], text[opened.start() :]
        raise _refusal(
            f"ends the generation prompt with {opening!r}, but writes message {index + 1} without it "
            f"({answer[:30]!r}). Remove {opening.strip()} from the prompt, keep the reasoning of answers, or mark"
        )
    # Earlier text may depend on later messages (Mistral writes the system message into the last question).
    inside = around_content(render, messages, index)
    if inside and text.startswith(inside[0]) and inside[0].endswith(prompt[len(render(before)) :]):
        return len(inside[0])
    raise _disagreement(index, "the messages before it, with the generation prompt", prompt, text)


def _header(render: Callable[..., str], messages: list[Message]) -> str:
    """The text that the generation prompt adds after the last message that is neither an answer nor a tool's result."""
    asked = [index for index, message in enumerate(messages) if message["role"] not in ("assistant", "tool")]
    question = messages[: asked[-1] + 1] if asked else []
    return render(question, add_generation_prompt=True).removeprefix(render(question))
