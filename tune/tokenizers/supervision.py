"""Find the characters of a rendered conversation that the assistant wrote."""

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tune.errors import TuneError
from tune.tokenizers.beginnings import Beginnings
from tune.tokenizers.chat_template import ChatTemplate, Message, Span

# Replaces a message's content, to find the text that the template writes around it. No dataset can contain it.
PROBE = f"\ufdd2{secrets.token_hex(8)}\ufdd3"
# The end of a reasoning model's generation prompt: <think>, <|START_THINKING|>, [THINK], <think></think>, and Gemma 4's
# <|channel>thought <channel|>.
_REASONING = re.compile(
    r"(([<\[][^<>\[\]\s]*think[^<>\[\]\s]*[>\]]\s*){1,2}|<\|channel>thought\s*<channel\|>\s*)$", re.IGNORECASE
)
_SWITCHES = [{name: value} for name in ("enable_thinking", "thinking") for value in (False, True)]


def supervised_spans(
    template: ChatTemplate,
    messages: list[Message],
    special_tokens: re.Pattern[str],
    tools: list | None = None,
    beginnings: Beginnings | None = None,
    **variables: Any,
) -> tuple[str, list[Span]]:
    """The rendered conversation, and the character spans of the assistant's turns with their end-of-turn token.

    If the template has `{% generation %}` blocks, they are the spans, as in transformers. Otherwise the turn of message
    i is the text that `messages[:i + 1]` renders in addition to `messages[:i]` with the generation prompt. Messages
    with `train: false` are left out. Raises TuneError if the template does not allow to find the spans.

    `beginnings` are those of a conversation that begins with `messages`, with the same template, tools and variables.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [index for index in turns if messages[index].get("train", True)]
    beginnings = beginnings or Beginnings(template, messages, tools, **variables)
    messages = beginnings.messages[: len(messages)]
    text, spans = beginnings.render_with_spans(len(messages))
    if not template.marks_generation:
        asked = beginnings.asked
        whole = text if asked is beginnings else asked.render(len(messages))
        spans = [_turn_span(asked, messages, index, whole, special_tokens) for index in trained]
        if asked is beginnings:
            return text, spans
        if spans and not text.endswith(tail := whole[spans[0][0] :]):
            raise _disagreement(trained[0], "it and what follows", tail, text[-len(tail) :])
        more = len(whole) - len(text)
        return text, [(start - more, end - more) for start, end in spans]
    if trained == turns:
        return text, spans
    if len(spans) != len(turns):
        raise TuneError(
            f"{template.origin} has {len(spans)} generation blocks for {len(turns)} assistant messages. To learn only "
            "some of the messages (train: false, train_on=last, or turns=as_seen), it must have one for each"
        )
    return text, [span for span, index in zip(spans, turns, strict=True) if index in trained]


def require_asked(beginnings: Beginnings, messages: list[Message], text: str) -> None:
    """Raise TuneError unless `text`, the rendered conversation, is how the model is asked for its last message: it
    begins with the messages before it and the generation prompt.

    Only templates with `{% generation %}` blocks need this. Without blocks, `supervised_spans` requires the same.
    """
    template = beginnings.template
    before = messages[:-1]
    if not template.marks_generation or all(message["role"] in ("system", "developer") for message in before):
        return  # an answer before the first question has no generation prompt
    prompts = [beginnings.render(len(before), add_generation_prompt=True, **switch) for switch in ({}, *_SWITCHES)]
    if not any(map(text.startswith, prompts)):
        at = common_prefix(prompts[0], text)
        raise TuneError(
            f"with turns=as_seen, message {len(messages)} must be learned as the model is asked for it, but "
            f"{template.origin} renders the text before it differently ({text[max(0, at - 20) : at + 30]!r}) than the "
            f"generation prompt ({prompts[0][max(0, at - 20) : at + 30]!r}). Change the template, or set turns=together"
        )


def end_of_turn(render: Callable[[list[Message]], str], special_tokens: re.Pattern[str]) -> str | None:
    """The special token that the template writes after an answer, or None."""
    try:
        text = render([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": PROBE}])
    except TuneError:  # no template, or one for another kind of conversation
        return None
    match = special_tokens.search(text.partition(PROBE)[2])
    return match[0] if match else None


def _turn_span(
    beginnings: Beginnings, messages: list[Message], index: int, text: str, special_tokens: re.Pattern[str]
) -> Span:
    """The span of assistant message `index` in `text`, the rendering of all messages."""
    start = _turn_start(beginnings, messages, index, text)
    up_to_here = text if index == len(messages) - 1 else beginnings.render(index + 1)
    if text.startswith(up_to_here):
        return start, _end_of_turn(up_to_here, start, special_tokens)

    # The template writes this turn differently if it is the last one (Qwen3 adds an empty <think> block). The end of
    # the turn then follows from the text after its content, which must not depend on the content.
    render = beginnings.render_changed
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


def _turn_start(beginnings: Beginnings, messages: list[Message], index: int, text: str) -> int:
    prompt = beginnings.render(index, add_generation_prompt=True)
    if text.startswith(prompt):
        # DiffusionGemma opens a turn after a tool's result, but its generation prompt does not. The model must not
        # write this header.
        is_after_result = index > 0 and messages[index - 1]["role"] == "tool"
        header = _header(beginnings, messages[:index]) if is_after_result else ""
        written = text.startswith(header, len(prompt)) and not prompt.endswith(header)
        return len(prompt) + (len(header) if written else 0)
    # A template that opens a reasoning block may have a switch that turns reasoning off or closes the block.
    for switch in _SWITCHES:
        switched = beginnings.render(index, add_generation_prompt=True, **switch)
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
    inside = around_content(beginnings.render_changed, messages, index)
    if inside and text.startswith(inside[0]) and inside[0].endswith(prompt[len(beginnings.render(index)) :]):
        return len(inside[0])
    raise _disagreement(index, "the messages before it, with the generation prompt", prompt, text)


def _header(beginnings: Beginnings, messages: list[Message]) -> str:
    """The text that the generation prompt adds after the last message that is neither an answer nor a tool's result."""
    asked = [index for index, message in enumerate(messages) if message["role"] not in ("assistant", "tool")]
    end = asked[-1] + 1 if asked else 0
    return beginnings.render(end, add_generation_prompt=True).removeprefix(beginnings.render(end))


def around_content(
    render: Callable[[list[Message]], str], messages: list[Message], index: int
) -> tuple[str, str] | None:
    """The text before and after the content of message `index`; None if it is not rendered exactly once."""
    probe = {**messages[index], "content": PROBE}
    before, *behind = render([*messages[:index], probe, *messages[index + 1 :]]).split(PROBE)
    return (before, behind[0]) if len(behind) == 1 else None


def _end_of_turn(text: str, start: int, special_tokens: re.Pattern[str]) -> int:
    """The end of `text`, or of its last special token if only whitespace follows: the model stops at the token."""
    end = start + len(text[start:].rstrip())
    closed = any(match.end() == end for match in special_tokens.finditer(text, start))
    return end if closed else len(text)


def common_prefix(*sequences: Sequence[Any]) -> int:
    """The length of the common prefix of all sequences."""
    together = enumerate(zip(*sequences, strict=False))
    differing = (at for at, (first, *others) in together if any(each != first for each in others))
    return next(differing, min(map(len, sequences)))


def _disagreement(index: int, what: str, part: str, whole: str) -> TuneError:
    at = common_prefix(part, whole)
    window = slice(max(0, at - 20), at + 30)
    return _refusal(
        f"does not show which text is the assistant's: rendered alone, {what} give another text "
        f"({part[window]!r}) than in the whole conversation ({whole[window]!r}), at message {index + 1}. Mark"
    )


def _refusal(what: str) -> TuneError:
    return TuneError(
        f"the chat template {what} the assistant's text with {{% generation %}} ... {{% endgeneration %}} in a copy, "
        "chat_template.jinja. Messages with train: false are not trained on"
    )
