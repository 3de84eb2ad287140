"""Rows that say which of several answers is the better one, or whether one answer is good."""

from itertools import combinations, takewhile
from typing import Any

from tune.datasets.formats.content import Chat, Content, Row, shown
from tune.datasets.formats.formats import Format, continuation
from tune.datasets.formats.messages import checked_messages, checked_tools, is_empty_answer
from tune.errors import TuneError

ContentPair = tuple[Content, Content]  # the better one first


def preference(row: Row) -> list[ContentPair] | str:
    """`chosen` and `rejected` behind a `prompt`, all strings or all lists of messages (optional `tools`). Without a
    `prompt` (or with one that only repeats it), what both answers begin with is the prompt, as TRL finds it."""
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    if chosen == rejected:
        return "chosen and rejected are the same"
    if isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, str | None):
        return _of_whole_conversations(prompt, chosen, rejected, row)
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        at = len([*takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))])
        at -= chosen[:at].endswith(" ")  # a word is learned with the space before it
        prompt, chosen, rejected = chosen[:at], chosen[at:], rejected[at:]
    better, worse = continuation(prompt, chosen, "chosen", row), continuation(prompt, rejected, "rejected", row)
    if isinstance(better, str):
        return better
    return worse if isinstance(worse, str) else [(better, worse)]


def ranked(row: Row) -> list[ContentPair] | str:
    """`prompt` and `completions`, the best one first, or with `scores` (more is better): each pair of a better and a
    worse one. Equal scores make no pair."""
    completions = row["completions"]
    if not isinstance(completions, list) or len(completions) < 2:
        raise TuneError(f"completions is {shown(completions)}; it must be a list of two answers or more")
    scores = row.get("scores")
    if scores is None:
        scores = [-rank for rank in range(len(completions))]
    if not isinstance(scores, list) or len(scores) != len(completions) or not all(map(_is_number, scores)):
        raise TuneError(f"scores is {shown(scores)}; it must be a list of {len(completions)} numbers")
    best_first = sorted(range(len(completions)), key=lambda index: -scores[index])
    answers: list[tuple[float, Content]] = []
    for index in best_first:
        content = continuation(row["prompt"], completions[index], f"completions[{index}]", row)
        if isinstance(content, str):
            return content
        answers.append((scores[index], content))
    pairs = [(better, worse) for (high, better), (low, worse) in combinations(answers, 2) if high > low]
    return pairs or "all scores are equal"


def labelled(row: Row) -> tuple[Content, bool] | str:
    """`prompt` and `completion`, and whether it is a good one: `label` true or false."""
    label = row["label"]
    if not (isinstance(label, bool) or (isinstance(label, int) and label in (0, 1))):
        raise TuneError(f"label is {shown(label)}; it must be true or false")
    content = continuation(row["prompt"], row["completion"], "completion", row)
    return content if isinstance(content, str) else (content, bool(label))


PREFERENCES = (
    Format("preference", preference, ("chosen", "rejected"), ("prompt", "tools")),
    Format("ranked", ranked, ("prompt", "completions"), ("scores", "tools")),
)
LABELLED = (Format("labelled", labelled, ("prompt", "completion", "label"), ("tools",)),)


def _of_whole_conversations(prompt: str | None, chosen: Any, rejected: Any, row: Row) -> list[ContentPair] | str:
    answers = [checked_messages(chosen, "chosen"), checked_messages(rejected, "rejected")]
    if prompt and all(answer[0]["role"] == "assistant" for answer in answers):
        answers = [[{"role": "user", "content": prompt}, *answer] for answer in answers]
    common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False))])
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if all(map(is_empty_answer, answer[common:])):
            return f"empty {name}"
    tools = checked_tools(row.get("tools"))
    better, worse = (Chat(answer, tools, prompt=common) for answer in answers)
    return [(better, worse)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
