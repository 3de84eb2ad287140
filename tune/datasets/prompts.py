"""Prompts for sampling answers, and their order."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, overload

from tune import rehearsal
from tune.datasets.accounting import Accounting
from tune.datasets.dataset import drawn_places
from tune.datasets.held_out import with_validation
from tune.datasets.kept_files import content_of, content_of_rows, key_of, prepared_arrays
from tune.datasets.loader import require_continuable, steps_of
from tune.datasets.parse.columns import QUESTIONS, WEIGHTS, require_columns, require_meaning
from tune.datasets.parse.content import Chat, Plain, Row, shown
from tune.datasets.parse.messages import checked_tools, conversation, question_of
from tune.datasets.progress import PreparationProgress
from tune.datasets.read.opening import PlacedRows, Source, read
from tune.datasets.read.readers import json_row
from tune.datasets.reasons import LEFT_OUT, TOO_LONG
from tune.datasets.rows import exact_text
from tune.datasets.stored_prompts import TYPES, NotJson, PromptRow, StoredRows, Summary, Summing, write
from tune.datasets.user_functions import applied, sources_of
from tune.datasets.workers import map_chunks
from tune.errors import TuneError, explained
from tune.files import cache_folder
from tune.secrets import without_secrets
from tune.terminal import visible
from tune.tokenizers import Message, Tokenizer
from tune.types import Epochs, NonNegativeInt, PositiveInt

COLUMNS = ("prompt", "messages", "conversations", "instruction", "input", "system", "tools")
DIFFERENT = 256  # number of prompts in a plan
RIGHT = ("answer", "completion", "output")  # the right answer, for rewards and scores
FOR_REWARDS = ("chosen", "rejected", "label", *WEIGHTS)  # columns that do not change the meaning of the prompt


@dataclass(frozen=True)
class Prompt:
    """The start of a conversation or a text, as tokens.

    `row` is the whole row of the data, which rewards read. `position` is the place in the order of a run, which may
    draw a prompt several times.
    """

    index: int
    tokens: list[int]
    row: Row
    messages: list[Message] | None = None
    tools: list | None = None
    position: int = 0


class Prompts(Sequence[Prompt]):
    """The prompts of a dataset; `dropped` counts the other rows by reason.

    `prompts` may be a list, or make each prompt when it is drawn, with its `summary`. `validation` are other prompts,
    to validate on.
    """

    validation: "Prompts | None" = None

    def __init__(
        self, name: str, prompts: Sequence[Prompt], dropped: Mapping[str, int], summary: Summary | None = None
    ) -> None:
        self.name, self.dropped = name, dict(dropped)
        self._prompts, self._summary = prompts, summary or _summary_of(prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._prompts[index]

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens and rows of all prompts."""
        return self._summary.fingerprint

    def extremes(self) -> list[Prompt]:
        """A few prompts, such as the longest. A model that can complete these can complete all."""
        return [self[index] for index in self._summary.extremes]

    def table(self) -> str:
        """A summary in one line."""
        dropped = "".join(f", {count:,} dropped: {reason}" for reason, count in self.dropped.items())
        shortest, longest = self._summary.shortest, self._summary.longest
        return f"{self.name}: {len(self):,} prompts of {shortest} to {longest} tokens{dropped}"

    def as_dict(self) -> dict[str, Any]:
        """The summary with the keys of `Accounting.as_dict`."""
        return {
            "source": self.name,
            "format": "prompts",
            "rows": len(self) + sum(self.dropped.values()),
            "dropped": self.dropped,
            "kept": len(self),
            "remarks": {},
            "tokens": self._summary.tokens,
            "lengths": {"shortest": self._summary.shortest, "longest": self._summary.longest},
        }


def _summary_of(prompts: Iterable[Prompt]) -> Summary:
    summing = Summing()
    for prompt in prompts:
        summing.add(PromptRow(prompt.row, prompt.tokens, exact_text(prompt.row), prompt.messages is not None))
    return summing.summary()


@dataclass(frozen=True)
class PromptReader:
    """Turn rows into prompts. A pure function of each row, so it can run in any process.

    The settings are those of `load_prompts`.
    """

    tokenizer: Tokenizer
    max_prompt_len: int
    columns: Mapping[str, str]
    ignore: Sequence[str]

    def __call__(self, rows: Sequence[tuple[str, Any]], is_first: bool = False) -> "PromptChunk":
        """The prompts of rows with their places. The columns of the first rows are checked."""
        kept = []
        for place, row in rows:
            with explained(place):
                content = self._parse(row, is_first)
                tokens = _tokens_of(content, self.tokenizer)
            if len(tokens) <= self.max_prompt_len:
                exact = exact_text(self._with_answer(row))
                kept.append(PromptRow(row, tokens, exact, isinstance(content, Chat)))
        return PromptChunk(kept, Accounting(rows=len(rows), kept=len(kept)))

    def prompt(self, index: int, row: Row, tokens: list[int]) -> Prompt:
        """The prompt of a row that has been read before, and of its tokens."""
        return _prompt_of(self._parse(row), tokens, self._with_answer(row), index)

    def _parse(self, row: Any, is_first: bool = False) -> Chat | Plain:
        return _parse(row, self.columns, [*self.ignore, *FOR_REWARDS], is_first)

    def _with_answer(self, row: Row) -> Row:
        """The row with the right answer under the name that rewards and scores read."""
        right = {ours: row[theirs] for ours, theirs in self.columns.items() if ours in RIGHT and theirs in row}
        return row | right


@dataclass(frozen=True)
class PromptChunk:
    """The prompts of a few rows; `accounting` counts the rows."""

    kept: list[PromptRow]
    accounting: Accounting


@dataclass(frozen=True)
class DrawnPrompts(Sequence[Prompt]):
    """Prompts that are made when they are drawn, from their `rows` and tokens."""

    rows: Sequence[tuple[Row, list[int]]]
    reader: PromptReader

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]  # also of negative indices
        if isinstance(places, range):
            return [self[place] for place in places]
        return self.reader.prompt(places, *self.rows[places])


def load_prompts(
    tokenizer: Tokenizer,
    path: str,
    split: str = "train",
    *,
    max_prompt_len: PositiveInt,
    columns: Mapping[str, str] | None = None,
    filter: str | None = None,
    ignore: Sequence[str] = (),
    subset: str | None = None,
    take: PositiveInt | None = None,
    validation: str | Mapping[str, Any] | None = None,
    cache_dir: str | None = None,
    workers: PositiveInt | None = None,
) -> Prompts:
    """Read the prompts of a dataset, which is opened as in `tune.datasets.load`.

    A row has one of:

    - `messages` or `conversations`; answers at the end are left out
    - `prompt`: a list of messages, or a string (plain text)
    - `instruction`: a string, as a chat of one turn; an optional `input` is appended to it

    `system` and `tools` are optional. `columns` maps these names to the names in the data. A right answer (`answer`,
    `completion` or `output` in `columns`) is added to the row under this name, for rewards and scores. `filter` is the
    dotted path of a function that returns whether to keep a row. Prompts of more than `max_prompt_len` tokens are
    dropped and counted. `validation` names the prompts in `.validation`, as in `tune.datasets.load`.

    The prompts are prepared once, by one process of a machine, and stored in `cache_dir` (default: $TUNE_CACHE or
    ~/.cache/tune). Rows with values that JSON lacks, such as dates from Parquet, are kept in memory instead.

    Raises:
        TuneError: a row has none of these columns, or an invalid value; a row has images or `<image>`, which a text
            model does not see, and `ignore` does not list them; or no prompt is left.
    """
    if rehearsal.planning():
        return full_prompts(tokenizer.vocab_size, max_prompt_len)
    if validation:
        return with_validation(load_prompts, locals())  # nothing but the arguments is defined yet
    with explained("path"):
        source = read(path, split, subset, take)
    source = source.rehearsed()
    reader = PromptReader(tokenizer, max_prompt_len, dict(columns or {}), [*ignore])
    try:
        return _prompts_in_cache(source, reader, filter, workers, cache_folder(cache_dir))
    except NotJson as reason:
        if os.environ.get("RANK", "0") == "0":
            problem = f"the rows hold {reason}, which JSON lacks. Each process reads and keeps all prompts itself"
            print(f"{visible(without_secrets(path))}: {problem}", file=sys.stderr, flush=True)
        return _prompts_in_memory(source, reader, filter, workers)


def _prompts_in_cache(
    source: Source, reader: PromptReader, filter: str | None, workers: int | None, folder: Path
) -> Prompts:
    """The prompts of a source, which are first prepared if they are not in the cache."""
    version = None if source.files else source.version()
    content = content_of(source.files, folder) if source.files else version or content_of_rows(iter(source))
    settings = {
        "columns": reader.columns,
        "ignore": reader.ignore,
        "max_prompt_len": reader.max_prompt_len,
        "filter": filter,
        "functions": sources_of(filter, "filter") if filter else {},
    }
    key = key_of("prompts", content, source.take, reader.tokenizer.fingerprint, settings)

    def written(files: Mapping[str, BinaryIO]) -> dict[str, Any]:
        dropped: Counter[str] = Counter()
        summary = write(_kept_rows(source, reader, filter, workers, dropped), files)
        return {"dropped": dict(sorted(dropped.items())), "summary": asdict(summary)}

    arrays, about = prepared_arrays(written, TYPES, folder / "prompts" / key, source.name)
    prompts = DrawnPrompts(StoredRows(arrays), reader)
    return Prompts(source.name, prompts, about["dropped"], Summary(**about["summary"]))


def _prompts_in_memory(source: Source, reader: PromptReader, filter: str | None, workers: int | None) -> Prompts:
    dropped: Counter[str] = Counter()
    rows = []
    summing = Summing()
    for prompt in _kept_rows(source, reader, filter, workers, dropped):
        summing.add(prompt)
        rows.append((prompt.row, prompt.tokens))
    return Prompts(source.name, DrawnPrompts(rows, reader), dict(sorted(dropped.items())), summing.summary())


def _kept_rows(
    source: Source, reader: PromptReader, filter: str | None, workers: int | None, dropped: Counter[str]
) -> Iterator[PromptRow]:
    """Yield the rows that become prompts, and count the others in `dropped`. Raises TuneError if none is left."""
    count = 0
    with PreparationProgress(source.name) as progress:
        for chunk in _chunks(_wanted(source, filter, dropped), reader, workers):
            progress.add(chunk.accounting.rows)
            too_long = chunk.accounting.rows - chunk.accounting.kept
            if too_long:
                dropped[TOO_LONG.replace("max_seq_len", "max_prompt_len")] += too_long
            count += chunk.accounting.kept
            yield from chunk.kept
    if not count:
        raise TuneError(
            f"{source.name}: no prompt is left of {dropped.total():,} rows. Dropped: {dict(dropped) or 'none'}"
        )


def _chunks(rows: Iterator[tuple[str, Any]], reader: PromptReader, workers: int | None) -> Iterator[PromptChunk]:
    """Read rows in several processes, but the first ones here: the names of columns are checked until one is kept."""
    for placed in rows:
        chunk = reader([placed], is_first=True)
        yield chunk
        if chunk.kept:
            break
    yield from map_chunks(reader, rows, workers)


def _wanted(source: Source, filter: str | None, dropped: Counter[str]) -> PlacedRows:
    """The rows that `filter` keeps. It is called here in the order of the rows, and not in several processes."""
    for place, row in source:
        with explained(place):
            is_wanted = not filter or not isinstance(row, dict) or applied(filter, "filter", row)
        if is_wanted:
            yield place, row
        else:
            dropped[f"{LEFT_OUT}{filter}"] += 1


def full_prompts(vocab_size: int, max_prompt_len: int) -> Prompts:
    """Prompts of `max_prompt_len` tokens without a common prefix, from which `tune plan` measures a step."""
    texts = [[first, *[0] * (max_prompt_len - 1)] for first in range(min(DIFFERENT, vocab_size))]
    chat: list[Message] = [{"role": "user", "content": ""}]  # environments need messages
    return Prompts("full prompts", [Prompt(index, tokens, {}, chat) for index, tokens in enumerate(texts)], {})


def placed_rows(path: str | None, setting: str) -> list[tuple[str, Any]]:
    """The rows of a file of prompts, with their places. A `.txt` file has one prompt per line.

    With `path=None`, reads lines of text or JSON from standard input. `setting` is the option that names the file.
    """
    name = path or "standard input"
    path = path and os.path.expanduser(path)
    if path and not Path(path).is_file():
        what = "this is a folder; give a file" if Path(path).is_dir() else "there is no such file"
        raise TuneError(f"{setting}: {path}: {what}")
    if path and not path.lower().endswith(".txt"):
        rows = list(read(path))
    else:
        with explained(f"{name} cannot be read", ValueError):
            text = Path(path).read_text(encoding="utf-8") if path else sys.stdin.read()
            lines = text.removeprefix("\ufeff").split("\n")  # splitlines() also splits at U+2028 and the like
            is_json = not path and lines[0].startswith("{")
            rows = [
                (f"{name}:{number}", json_row(line) if is_json else {"prompt": line})
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
    if not rows:
        raise TuneError(f"{name} contains no prompt")
    return rows


def open_prompts(
    tokenizer: Tokenizer, rows: Iterable[tuple[str, Any]], *, system: str | None = None, raw: bool = False
) -> list[Prompt]:
    """The prompts of rows, as `load_prompts` reads them, with one difference.

    A text becomes the first message of a chat if the tokenizer has a chat template, unless `raw` is set. `system` is
    the system message of chats.
    """
    prompts: list[Prompt] = []
    is_chat = not raw and tokenizer.chat_template is not None
    for place, row in rows:
        text = row.get("prompt") if isinstance(row, dict) else None
        with explained(place):
            if system and (raw or (isinstance(text, str) and not is_chat)):
                raise TuneError("a system message needs a chat template; raw text does not use one")
            if raw and isinstance(row, dict) and not isinstance(text, str):
                raise TuneError("raw text must be a string in the column prompt")
            asked = {**row, "prompt": None, "instruction": text} if isinstance(text, str) and is_chat else row
            asked = {**asked, "system": system} if system and isinstance(row, dict) else asked
            content = _parse(asked, None, FOR_REWARDS)
            tokens = _tokens_of(content, tokenizer)
        prompts.append(_prompt_of(content, tokens, row, len(prompts)))
    return prompts


def _parse(row: Any, columns: Mapping[str, str] | None, ignore: Sequence[str], is_first: bool = False) -> Chat | Plain:
    """The conversation of a row, without the answers at its end, or its text.

    `columns` is None if there is no such setting. It is checked against the first row.
    """
    if isinstance(row, TuneError):  # a malformed line
        raise row
    if not isinstance(row, dict):
        raise TuneError(f"the row is {shown(row)}; it must be an object with columns")
    if columns and is_first:
        require_columns(row, columns, [*COLUMNS, *RIGHT], "the first row")
    named = {**row, **{ours: row.get(theirs) for ours, theirs in (columns or {}).items()}}
    for ours, kinds in {"prompt": str | list, "instruction": str}.items():
        if ours in (columns or {}) and not isinstance(named[ours], kinds):
            raise TuneError(
                f"columns.{ours}={(columns or {})[ours]}: the value is {shown(named[ours])}; it must be text"
            )
    if isinstance(text := named.get("prompt"), str):
        content: Chat | Plain = Plain(text, "")
        require_meaning(row, ["prompt"], content, ignore)
        return content
    if isinstance(named.get("instruction"), str):
        named["messages"] = [{"role": "user", "content": question_of(named)}]
    column = _column_of_messages(named, row, columns)
    messages = conversation(named, column)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise TuneError(f"{column} contains only answers, no prompt")
    content = Chat(messages)
    require_meaning(row, [column], content, ignore)
    return replace(content, tools=checked_tools(named.get("tools")))


def _column_of_messages(named: Row, row: Row, columns: Mapping[str, str] | None) -> str:
    """The name of the column with a conversation. Raises TuneError if there is none."""
    known = ("prompt", "messages", "conversations")
    if column := next((name for name in known if named.get(name)), None):
        return column
    if empty := next((name for name in (*known, "instruction") if name in row), None):
        raise TuneError(f"{empty} is null or empty; it must be a text or messages")
    theirs = next((name for name in row if name.lower() in QUESTIONS), "its_name")
    setting = f"set 'dataset.columns={{instruction: {theirs}}}' (a chat), or prompt instead (plain text)"
    advice = "rename it to prompt" if columns is None else setting
    raise TuneError(
        f"no column messages, conversations, prompt or instruction; the row has {', '.join(row)}. If the prompt has "
        f"another name, {advice}"
    )


def _tokens_of(content: Chat | Plain, tokenizer: Tokenizer) -> list[int]:
    """The tokens that the model continues."""
    if isinstance(content, Plain):
        tokens = [*tokenizer.prefix_ids, *tokenizer.encode(content.prompt)]
        if not tokens:
            raise TuneError("prompt is empty, and the tokenizer adds no BOS")
        return tokens
    tokenizer.require_chat_template()
    text = tokenizer.apply_chat_template(content.messages, tools=content.tools, add_generation_prompt=True)
    return tokenizer.encode(text)


def _prompt_of(content: Chat | Plain, tokens: list[int], row: Row, index: int) -> Prompt:
    if isinstance(content, Plain):
        return Prompt(index, tokens, row)
    return Prompt(index, tokens, row, content.messages, content.tools)


class PromptLoader:
    """Iterate over the steps of a run: `for step, prompts in data`, with `step` from 1 to `len(data)`.

    The order is a function of (seed, epoch). Every process gets all prompts of a step. `draw` returns further prompts,
    for steps that replace some.
    """

    def __init__(
        self, dataset: Prompts, prompts_per_step: PositiveInt, epochs: Epochs = 1,
        max_steps: PositiveInt | None = None, seed: NonNegativeInt = 0,
    ) -> None:  # fmt: skip
        self.dataset, self.prompts_per_step, self.seed = dataset, prompts_per_step, seed
        self.epochs, self.max_steps, self.steps_per_epoch = epochs, max_steps, len(dataset) // prompts_per_step
        if prompts_per_step > len(dataset) and not rehearsal.is_cut():
            raise TuneError(
                f"prompts_per_step={prompts_per_step} exceeds the {len(dataset)} prompts of {dataset.name}. Lower it"
            )
        whole = steps_of(epochs, self.steps_per_epoch) if not rehearsal.is_cut() else rehearsal.UNKNOWN
        self.steps = whole if max_steps is None else min(whole, max_steps)
        self.step = self.position = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[int, list[Prompt]]]:
        while self.step < self.steps:
            self.step += 1
            yield self.step, self.draw(self.prompts_per_step)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts, epoch after epoch. Extra draws do not change `len`."""
        start, self.position = self.position, self.position + count
        indices = drawn_places(len(self.dataset), start, self.position, self.seed)
        return [replace(self.dataset[index], position=at) for at, index in enumerate(indices.tolist(), start)]

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step that was yielded."""
        return {"step": self.step, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a saved step. Raises TuneError if the prompts or their order differ."""
        require_continuable(state, self._identity(), self.steps, "max_prompt_len")
        self.step, self.position = state["step"], state["position"]

    def _identity(self) -> dict[str, Any]:
        return {
            "fingerprint": self.dataset.fingerprint, "seed": self.seed, "prompts_per_step": self.prompts_per_step,
        }  # fmt: skip
