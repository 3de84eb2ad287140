"""The formats of preference rows: better and worse answers to a prompt, or answers with a label."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tune.datasets.parse.content import Chat, Content, Dropped, Plain, Row, require
from tune.datasets.parse.messages import checked_messages, checked_tools, conversation, question_of
from tune.errors import TuneError
from tune.tokenizers import common_prefix

QUESTIONS = ("question", "instruction", "query", "problem", "input")


def preference(row: Row) -> list[Content]:
    """`chosen` and `rejected`: strings, messages, or lists of messages. `rejected` may be a list of several answers.

    `prompt` (a string or messages) precedes the answers. Without it, their common beginning is the prompt.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    several = isinstance(rejected, list) and (not rejected or not isinstance(rejected[0], dict))
    worse = (
        {f"rejected[{index}]": answer for index, answer in enumerate(rejected)} if several else {"rejected": rejected}
    )
    answers = {"chosen": chosen, **(worse or {"rejected": None})}
    answers = {name: [answer] if isinstance(answer, dict) else answer for name, answer in answers.items()}
    for name, answer in answers.items():
        if answer in (None, "", []):
            raise Dropped(f"empty {name.partition('[')[0]}")
    if all(isinstance(answer, str) for answer in answers.values()):
        return _compared(_texts(row, [*answers.values()]))
    for name, answer in answers.items():
        require(isinstance(answer, list), name, answer, "a list of messages, or all answers strings")
    return _chats(row, [checked_messages(answer, name) for name, answer in answers.items()])


def instructed(row: Row) -> list[Content]:
    """`instruction`, `chosen` and `rejected`: strings, as a chat of one turn.

    `input` (appended to the instruction) and `system` are optional.
    """
    question, rejected = question_of(row), row["rejected"]
    require(question != "", "instruction", row["instruction"], "a string")
    several = rejected if isinstance(rejected, list) else [rejected]
    for name, answer in (("chosen", row["chosen"]), *(("rejected", answer) for answer in several)):
        require(isinstance(answer, str | None), name, answer, "a string")
    chosen, *worse = (answer and [{"role": "assistant", "content": answer}] for answer in (row["chosen"], *several))
    return preference({**row, "prompt": question, "chosen": chosen, "rejected": worse})


def graded(parse: Callable[[Row], list[Content]]) -> Callable[[Row], list[Content]]:
    """Add to a format of pairs an optional `margin`: by how much the chosen answer is better."""

    def parse_graded(row: Row) -> list[Content]:
        margin = row.get("margin")
        is_number = isinstance(margin, int | float | None) and not isinstance(margin, bool)
        require(is_number and math.isfinite(margin or 0), "margin", margin, "a finite number")
        answers = parse(row)
        return [replace(answer, columns={**answer.columns, "margin": float(margin or 0)}) for answer in answers]

    return parse_graded


def labelled(parse: Callable[[Row], list[Content]]) -> Callable[[Row], list[Content]]:
    """Add a `label` to a format: true or 1 for a good answer, false or 0 for a bad one (KTO)."""

    def parse_labelled(row: Row) -> list[Content]:
        label, (content,) = row["label"], parse(row)
        is_right = label in (0, 1) and isinstance(label, bool | int)
        require(is_right, "label", label, "true (a good answer) or false (a bad one)")
        if isinstance(content, Chat):
            content = _answered(content, "messages")
        return [replace(content, columns={"label": int(label)})]

    return parse_labelled


def _texts(row: Row, answers: list[str]) -> list[Plain]:
    prompt = row.get("prompt")
    require(isinstance(prompt, str | None), "prompt", prompt, "a string, as chosen and rejected are")
    if prompt is None:
        if asked := next((name for name, value in row.items() if value and name.lower() in QUESTIONS), None):
            raise TuneError(
                f"chosen and rejected answer {asked}, which would not be read. Set "
                f"'dataset.columns={{instruction: {asked}}}' (a chat), or 'dataset.columns={{prompt: {asked}}}' (text)"
            )
        # The common beginning up to its last blank, so that no word is split.
        shared = re.match(r"(.*)\s", answers[0][: common_prefix(*answers)], re.DOTALL)
        if not shared:
            raise TuneError("no prompt: chosen and rejected have no common beginning. Add a column prompt")
        prompt = shared[1]
        answers = [answer[len(prompt) :] for answer in answers]
    return [Plain(prompt, answer) for answer in answers]


def _chats(row: Row, answers: list[list[Any]]) -> list[Content]:
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt:
        prompt = [{"role": "user", "content": prompt}]
    before = checked_messages(prompt, "prompt") if prompt else []
    # Many datasets repeat the prompt in the answers.
    chats = [answer if answer[: len(before)] == before else [*before, *answer] for answer in answers]
    chats = [conversation({"messages": chat, "system": row.get("system")}, "messages") for chat in chats]
    tools = checked_tools(row.get("tools"))
    shared = common_prefix(*chats)
    contents = [_answered(Chat(chat, tools, shared), "chosen and rejected") for chat in chats]
    if all(message["role"] == "system" for message in chats[0][:shared]):
        raise TuneError("chosen and rejected answer different prompts: their first messages differ")
    return _compared(contents)


def _answered(chat: Chat, place: str) -> Chat:
    """Set the length of the prompt: at most all messages but the last, which must be an answer."""
    last = len(chat.messages) - 1
    if chat.messages[last]["role"] != "assistant":
        raise TuneError(f"{place} must end with an assistant message, not with {chat.messages[last]['role']}")
    return Chat(chat.messages, chat.tools, min(chat.prompt or last, last))


def _compared(contents: Sequence[Chat | Plain]) -> list[Content]:
    """Number the answers to one prompt; the first is the best."""
    return [replace(content, columns={"answer": index}) for index, content in enumerate(contents)]
