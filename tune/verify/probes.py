"""Texts and prompts for a program and for the run's own model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tune.collators import IGNORE, Sample
from tune.datasets import open_prompts
from tune.errors import TuneError
from tune.tokenizers import Message, Tokenizer

# Used if the run's own data cannot be read: prose, other scripts, numbers, code.
TEXTS = (
    "The old bridge was closed in 1987, after a flood had carried away two of its arches. Since then people cross the "
    "river by a small ferry, which takes about ten minutes and stops at sunset.",
    "To make the dough, mix 500 g of flour with 325 ml of water, 10 g of salt and a little yeast. Let it rest for an "
    "hour, fold it twice, and bake it at 230 degrees until the crust is dark brown.",
    "def mean(values):\n    if not values:\n        raise ValueError(values)\n    return sum(values) / len(values)\n",
    "Water boils at a lower temperature on a mountain, because the pressure of the air is lower there. At 3,000 m it "
    "is about 90 °C, so that potatoes take longer to cook.",
    "Der Zug nach Zürich fährt um 7:45 Uhr von Gleis 12 ab. Où est la gare ? 東京は日本の首都です。",
    "Question: A shop sells pens at 3 for 2 euros. How much do 12 pens cost?\nAnswer: Twelve pens are four times three "
    "pens, so they cost 4 * 2 = 8 euros.",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}},
            "required": ["city"],
        },
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
ASKED: Message = {"role": "user", "content": "Is it raining in Oslo?"}
TURNS: list[Message] = [
    {"role": "user", "content": "Name a color."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "And another?"},
    {"role": "assistant", "content": "Red."},
    {"role": "user", "content": "A third?"},
    {"role": "assistant", "content": "Green."},
    {"role": "user", "content": "Thanks.  Which was first?"},
]
# One conversation of each kind, and its tools. If a template rejects one (some have no system message), the others are
# used.
CONVERSATIONS: tuple[tuple[list[Message], list[Any] | None], ...] = (
    ([{"role": "user", "content": "Hello!"}], None),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are  you?\n"}], None),
    (TURNS[:3], None),
    (TURNS, None),
    ([ASKED], [TOOL]),
    (
        [
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "rain"},
        ],
        [TOOL],
    ),
)


@dataclass(frozen=True)
class Probe:
    """A text as token `ids`, each predicted from the ids before it, and a `prompt` to answer: its beginning, or another
    text. `plain` is the text without special tokens, to compare the encoding."""

    ids: list[int]
    prompt: list[int]
    plain: str


def probes_of_data(rows: Iterable[Sequence[Sample]], tokenizer: Tokenizer, longest: int) -> list[Probe]:
    """Return probes from the first sample of each row of a dataset. The prompt is the text before the first supervised
    token."""
    return [_probe(sample, tokenizer, longest) for sample, *_ in rows]


def _probe(sample: Sample, tokenizer: Tokenizer, longest: int) -> Probe:
    last = int(sample.labels[-1])
    ids = [*map(int, sample.tokens), *([] if last == IGNORE else [last])]
    learned = next(at for at, label in enumerate(sample.labels) if label != IGNORE) + 1
    return Probe(ids[:longest], ids[:learned], tokenizer.decode(ids, skip_special_tokens=True))


def probes_of_prompts(rows: Iterable[tuple[str, Any]], tokenizer: Tokenizer, longest: int) -> list[Probe]:
    """Return probes from the rows (place, row) of a file of prompts, as `tune.datasets.open_prompts` reads them."""
    prompts = [prompt.tokens for prompt in open_prompts(tokenizer, rows)]
    return [Probe(ids[:longest], ids, tokenizer.decode(ids, skip_special_tokens=True)) for ids in prompts]


def probes_of_texts(tokenizer: Tokenizer, longest: int) -> list[Probe]:
    """Return probes from built-in texts. The prompt is the first half of a text, as a chat if there is a template."""
    rows = [("a text", {"prompt": text[: len(text) // 2]}) for text in TEXTS]
    ids = [[*tokenizer.prefix_ids, *tokenizer.encode(text)] for text in TEXTS]
    prompts = open_prompts(tokenizer, rows)
    return [
        Probe(whole[:longest], prompt.tokens, text) for whole, prompt, text in zip(ids, prompts, TEXTS, strict=True)
    ]


def conversations(tokenizer: Tokenizer) -> dict[str, tuple[list[Message], list[Any] | None]]:
    """Return the conversations that the tokenizer's template accepts, with their tools, by rendered text, including the
    beginning of the next answer; empty without a template."""
    found: dict[str, tuple[list[Message], list[Any] | None]] = {}
    for messages, tools in CONVERSATIONS if tokenizer.chat_template is not None else ():
        try:
            found[tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools)] = messages, tools
        except TuneError as error:
            refusal = error
    if tokenizer.chat_template is not None and not found:
        raise refusal
    return found
