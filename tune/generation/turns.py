"""Turns of a conversation with an environment: an answer as a message, and what a chat template writes behind it."""

import json
import re
from collections.abc import Callable
from typing import Any

from tune.errors import TuneError
from tune.tokenizers import PROBE, Message, common_prefix

# Behind these stand calls as JSON: Qwen and Hermes, Mistral, Llama 3, Phi-4. Llama 3 writes a call alone, too.
_CALLS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>")


def assistant_message(text: str, tools: list | None, turn: int) -> Message:
    """The assistant's message, its content `text` as it is. Where the prompt has `tools`, it has the calls that `text`
    writes as JSON, in OpenAI's form, each with an id of nine characters (which Mistral's templates want)."""
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
    """An `answer` and the `messages` behind it as templates take them: where a tool answers, it was called. Results
    without `tool_call_id` and `name` have those of the calls in their order; of the calls one is shown, and without
    what was sampled, which a template might refuse."""
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
    """What the template writes behind the answer `turn[0]`, up to where the next answer begins: `turn[1:]`. The answer
    has ended with `end`, one of the tokens `stops`, or with a stop string; then the template ends it.

    Taken from behind a text that stands in for the answer: templates rewrite answers that are not the last one (Qwen3
    drops reasoning), and what was sampled is not to be rewritten. Raises TuneError where the template does not show
    where that is, or does not write the first of the messages.
    """
    stop = re.compile("|".join(map(re.escape, stops)) or "(?!)")
    standing_in: list[tuple[Message, bool]] = [({"role": "assistant", "content": PROBE}, False)]
    if "tool_calls" in turn[0]:
        (call,) = turn[0]["tool_calls"]
        function = {**call["function"], "arguments": {"text": PROBE}}
        standing_in.insert(0, ({**turn[0], "tool_calls": [{**call, "function": function}]}, True))
    refusal = TuneError("environment: the chat template does not show where an answer ends, or what answers it")
    for answer, is_call in standing_in:
        try:
            _, *inside = render([*before, answer, *turn[1:]], add_generation_prompt=True).split(PROBE)
            _, *last = render([*before, answer]).split(PROBE)
            _, *shown = render([*before, answer, {**turn[1], "content": PROBE}, *turn[2:]]).split(PROBE)
        except TuneError as error:  # a template that knows no calls, or wants them
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
        # The beginning of the next turn may be what has ended this one (GLM): it stands there already.
        return behind[behind.index(end) + len(end) :] if end and behind.lstrip().startswith(end) else behind
    raise refusal
