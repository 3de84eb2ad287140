"""Turns of a conversation with an environment: parse answers into messages, and render the text after an answer."""

import json
import re
from collections.abc import Callable
from typing import Any

from tune.errors import TuneError
from tune.tokenizers import PROBE, Message, common_prefix

# JSON tool calls follow these: Qwen and Hermes, Mistral, Llama 3, Phi-4. Llama 3 also writes a call without any.
_CALLS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>")


def assistant_message(text: str, tools: list | None, turn: int) -> Message:
    """Return the assistant's message with `text` as its content. If the prompt has `tools`, it also has the JSON calls
    in `text` in OpenAI's form, each with a nine-character id, as Mistral's templates require."""
    calls: list[dict[str, Any]] = []
    for piece in (_CALLS.split(text)[1:] or [text]) if tools else []:
        try:
            value, _ = json.JSONDecoder().raw_decode(piece.strip())
        except (ValueError, RecursionError):
            continue
        for call in value if isinstance(value, list) else [value]:
            given = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
            if isinstance(given, dict) and isinstance(call.get("name"), str):
                function = {"name": call["name"], "arguments": given}
                calls.append({"id": f"c{turn:04}{len(calls):04}", "type": "function", "function": function})
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def answered(answer: Message, messages: list[Message]) -> list[Message]:
    """Return an `answer` and the `messages` after it in a form that templates accept: tool results must follow a call.
    Results without `tool_call_id` and `name` get those of the calls, in order. Only one call is kept, without the
    sampled arguments, which a template might reject."""
    if messages[0]["role"] != "tool":
        return [{"role": "assistant", "content": answer["content"]}, *messages]
    calls = answer.get("tool_calls") or [{"id": "c00000000", "function": {"name": "tool"}}]
    named = {call["id"]: call["function"]["name"] for call in calls}
    ids = iter(named)
    results = []
    for message in messages:
        if message["role"] == "tool":
            index = message.get("tool_call_id") or next(ids, calls[-1]["id"])
            message = {"tool_call_id": index, "name": named.get(index, calls[-1]["function"]["name"]), **message}
        results.append(message)
    called = {"name": results[0]["name"], "arguments": {}}
    call = {"id": results[0]["tool_call_id"], "type": "function", "function": called}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, *results]


def text_behind(
    render: Callable[..., str], before: list[Message], turn: list[Message], stops: list[str], end: str | None
) -> str:
    """Return the text that the template writes after the answer `turn[0]`, up to the start of the next answer: the
    messages `turn[1:]`. The answer ended with `end`, one of the tokens `stops`, or with a stop string; in the latter
    case the template ends the answer.

    The template renders a placeholder for the answer: templates rewrite answers other than the last one (Qwen3 drops
    reasoning), but sampled text must not change. Raises TuneError if the placeholder cannot be located in the rendered
    text, or the template does not render the first message.
    """
    stop = re.compile("|".join(map(re.escape, stops)) or "(?!)")
    standing_in: list[tuple[Message, bool]] = [({"role": "assistant", "content": PROBE}, False)]
    if "tool_calls" in turn[0]:
        (call,) = turn[0]["tool_calls"]
        function = {**call["function"], "arguments": {"text": PROBE}}
        standing_in.insert(0, ({**turn[0], "tool_calls": [{**call, "function": function}]}, True))
    refusal = TuneError("environment: cannot find the end of an answer, or the reply to it, in the chat template")
    for answer, is_call in standing_in:
        try:
            _, *inside = render([*before, answer, *turn[1:]], add_generation_prompt=True).split(PROBE)
            _, *last = render([*before, answer]).split(PROBE)
            _, *shown = render([*before, answer, {**turn[1], "content": PROBE}, *turn[2:]]).split(PROBE)
        except TuneError as error:  # a template without support for calls, or one that requires them
            refusal = error if is_call else refusal
            continue
        if len(inside) != 1 or len(last) != 1 or len(shown) != 2:
            continue
        behind = inside[0]
        if ends := [*stop.finditer(behind, 0, common_prefix(behind, last[0]))]:  # the template ends the turn
            return behind[ends[-1].end() if end else ends[-1].start() :]
        first = stop.search(behind)
        if is_call and first is None:
            continue
        behind = behind[first.start() :] if is_call and first else behind
        # The token that ended this turn may also begin the next one (GLM): it is already there.
        return behind[behind.index(end) + len(end) :] if end and behind.lstrip().startswith(end) else behind
    raise refusal
