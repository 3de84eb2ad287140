"""Convert messages from the spellings in datasets to the form that chat templates expect."""

import json
from collections.abc import Collection
from typing import Any

from tune.datasets.parse.content import Row, require, require_weight, shown
from tune.errors import TuneError, explained
from tune.lookup import did_you_mean
from tune.tokenizers import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
# Names of other libraries for `train`: ms-swift's and Axolotl's. True or false.
TRAIN = ("loss", "training")
# Names under which a weight would not be read, some of them misspelled.
UNREAD = (
    *TRAIN, "loss_weight", "loss_scale", "loss_mask", "mask", "trainable", "weigth", "wieght", "weights", "trian",
    "trained", "train_detail", "training_detail",
)  # fmt: skip

# The names in ShareGPT's `from`. A `function_call` holds the call as JSON.
SHARE_GPT_ROLES = {
    **{name: "user" for name in ("human", "user")},
    **{name: "assistant" for name in ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call")},
    **{name: "tool" for name in ("tool", "observation", "function_response")},
    "system": "system",
}
# Keys that are read here, and ids, which change nothing. The chat template may read others.
READ = {"role", "pictures", "content", "train", "weight", "tool_calls", "tool_call_id", "id", *REASONING}


def conversation(row: Row, column: str) -> list[Message]:
    """The messages in a column, after the system message in the row's column `system`, if any."""
    messages = row[column]
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = _parsed(messages, column)  # CSV can only hold strings
    messages = checked_messages(messages, column)
    system = row.get("system")
    require(isinstance(system, str | None), "system", system, "a string")
    if not system or messages[0] == {"role": "system", "content": system}:
        return messages
    if messages[0]["role"] == "system":
        raise TuneError(f"system and {column}[0] are both system messages; remove one")
    return [{"role": "system", "content": system}, *messages]


def checked_messages(messages: Any, column: str) -> list[Message]:
    """The messages in the form of chat templates. Raises TuneError, which names the column, if one is invalid."""
    wanted = "a text or a list of messages" if column == "prompt" else "a list of messages"
    require(isinstance(messages, list) and len(messages) > 0, column, messages, wanted)
    return [_checked(message, f"{column}[{index}]") for index, message in enumerate(messages)]


def question_of(row: Row) -> str:
    """A row's `instruction`, followed by its `input`, if any."""
    for name in ("instruction", "input"):
        require(isinstance(row.get(name), str | None), name, row.get(name), "a string")
    return "\n\n".join(filter(None, (row["instruction"], row.get("input"))))


def is_empty_answer(message: Message) -> bool:
    """Whether an assistant message has no content, no reasoning and no tool calls."""
    return message["role"] == "assistant" and not any(map(message.get, ("content", "tool_calls", *REASONING)))


def checked_tools(tools: Any) -> list | None:
    """A list of JSON schemas, or None. A JSON string is parsed, since a Parquet column cannot mix schemas of several
    shapes."""
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    is_right = tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))
    require(is_right, "tools", tools, "a list of JSON schemas")
    return tools or None


def _checked(message: Any, place: str) -> Message:
    require(isinstance(message, dict), place, message, "an object with role and content")
    message = {key: value for key, value in message.items() if value is not None}
    if "from" in message and "role" not in message:
        message = _from_share_gpt(message, place)
    if message.get("role") == "function":  # OpenAI's older name, as `function_call` is
        message["role"] = "tool"
    if call := message.pop("function_call", None):
        if message.get("tool_calls"):
            raise TuneError(f"{place} has function_call and tool_calls; remove one")
        message["tool_calls"] = [_parsed(call, f"{place}.function_call") if isinstance(call, str) else call]
    role = message.get("role")
    _require_one_of(ROLES, role, f"{place}.role")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], role, f"{place}.tool_calls")
        if not message["tool_calls"]:
            del message["tool_calls"]
    message = _without_thinking_parts(message, f"{place}.content")
    content = _joined(message.get("content"), f"{place}.content", bool(message.get("pictures")))
    is_right = isinstance(content, str | list) or (content is None and "tool_calls" in message)
    require(is_right, f"{place}.content", content, "a string")
    if content is not None:
        message["content"] = content
    for name in REASONING:
        require(isinstance(message.get(name, ""), str), f"{place}.{name}", message.get(name), "a string")
    _read_train(message, place)
    train = message.get("train", True)
    is_number = isinstance(train, int | float) and 0 <= train <= 1
    require(is_number, f"{place}.train", train, "true or false, or a number from 0 to 1")
    if train in (0, 1) and "train" in message:
        message["train"] = bool(train)
    if "weight" in message:  # OpenAI's files
        message = _weighed(message, f"{place}.weight")
    return message


def _read_train(message: Message, place: str) -> None:
    """Read other libraries' names for `train`. Raise TuneError for names under which a weight would not be read."""
    for name in TRAIN:
        if type(value := message.get(name)) in (bool, int) and value in (0, 1):
            value = bool(message.pop(name))
            if message.setdefault("train", value) != value:
                raise TuneError(f"{place}: {name} is {value}, but train is {message['train']}. Remove one of them")
    for name in UNREAD:
        if isinstance(value := message.get(name), int | float | list):
            raise TuneError(
                f"{place}.{name} is {shown(value)}, which is not read. Name it weight (a number from 0 to 1) or train "
                "(true or false), or remove it"
            )


def _weighed(message: Message, place: str) -> Message:
    """Check the message's `weight`. 0 becomes `train: false`, and 1 is left out, because it changes nothing."""
    weight: Any = message["weight"]
    require_weight(weight, place)
    if weight and message["role"] != "assistant":
        raise TuneError(
            f"{place} is {weight}, but the message has the role {message['role']}; only assistant messages can have "
            "a weight. To train on other messages, set dataset.train_on, or train: true in them"
        )
    train = message.get("train")
    if (train and not weight) or (train not in (None, False, True) and weight != 1):
        raise TuneError(f"{place} is {weight}, but train is {train}. Remove one of them")
    if 0 < weight < 1:
        return message
    message = {key: value for key, value in message.items() if key != "weight"}
    return message if weight else {**message, "train": False}


def _require_one_of(known: Collection[str], value: Any, place: str) -> None:
    if not isinstance(value, str) or value not in known:
        hint = did_you_mean(str(value), known)
        raise TuneError(f"{place} is {shown(value)}; it must be one of {', '.join(known)}.{hint}")


def _from_share_gpt(message: Message, place: str) -> Message:
    """Convert `from` and `value` to `role` and `content`."""
    name: Any = message["from"]
    value: Any = message.get("value")
    _require_one_of(SHARE_GPT_ROLES, name, f"{place}.from")
    has_pictures = bool(message.get("pictures"))
    require(isinstance(value, str) or has_pictures, f"{place}.value", value, "a string")
    rest = {key: item for key, item in message.items() if key not in ("from", "value")}
    if name == "function_call":
        calls = _parsed(value, f"{place}.value")
        return {**rest, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return {**rest, "role": SHARE_GPT_ROLES[name], "content": value}


def _without_thinking_parts(message: Message, place: str) -> Message:
    """Move content parts of the type `thinking` (Mistral, Anthropic) to the message's `reasoning_content`."""
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return message
    thoughts = [(index, part) for index, part in enumerate(content) if part.get("type") == "thinking"]
    if not thoughts:
        return message
    if known := next((name for name in REASONING if message.get(name)), None):
        raise TuneError(f"{place}[{thoughts[0][0]}].type is thinking, but the message also has {known}; remove one")
    texts = []
    for index, part in thoughts:
        inside = part.get("thinking")  # a text, or parts of text
        text = _joined(inside, f"{place}[{index}].thinking")
        require(isinstance(text, str), f"{place}[{index}].thinking", inside, "a string, or parts of text")
        texts.append(text)
    rest = [part for part in content if part.get("type") != "thinking"]
    return {**message, "content": rest or "", "reasoning_content": "\n".join(texts)}


def _joined(content: Any, place: str, has_pictures: bool = False) -> Any:
    """Join content parts into one text without separator, as templates that take parts do. Parts stay if some are
    pictures."""
    if not isinstance(content, list) or not content or not all(isinstance(part, dict) for part in content):
        require(not isinstance(content, list), place, content, "a string")
        return content
    for index, part in enumerate(content):
        if has_pictures and part == {"type": "image"}:
            continue
        if part.get("type") != "text":
            raise TuneError(f"{place}[{index}].type is {shown(part.get('type'))}; only text and thinking are supported")
        require(isinstance(part.get("text"), str), f"{place}[{index}].text", part.get("text"), "a string")
    return content if has_pictures else "".join(part["text"] for part in content)


def _tool_calls(calls: Any, role: str, place: str) -> list[dict[str, Any]]:
    """Convert calls to `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, which all templates
    read."""
    is_right = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    require(is_right, place, calls, "a list of calls")
    if calls and role != "assistant":
        raise TuneError(f"{place}: the message has the role {role}, but only the assistant can call tools")
    return [_tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    if "function" in call:
        place = f"{place}.function"
        function, rest = call["function"], {key: value for key, value in call.items() if key != "function"}
    else:
        keys = ("name", "arguments")
        function = {key: call[key] for key in keys if key in call}
        rest = {key: value for key, value in call.items() if key not in keys}
    name = function.get("name") if isinstance(function, dict) else None
    require(isinstance(name, str) and name != "", f"{place}.name", name, "the name of a tool")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{place}.arguments") if arguments.strip() else None
    require(isinstance(arguments, dict | None), f"{place}.arguments", arguments, "an object, or an object as JSON")
    return {"type": "function", **rest, "function": {**function, "arguments": arguments or {}}}


def _parsed(text: str, place: str) -> Any:
    with explained(f"{place} is not valid JSON", ValueError, RecursionError):
        return json.loads(text)
