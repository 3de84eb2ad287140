"""Answer prompts with a model, an adapter or a run. MODEL is its folder. Answers go to standard output, everything else
to standard error. With torchrun or Ray, processes share the prompts.

    tune generate runs/mine --prompt "Why is the sky blue?"
    tune generate ./model --adapter ./adapter --prompts questions.jsonl --out answers.jsonl
    tune generate runs/mine --prompts q.jsonl --samples 8 --temperature 1 --score my.f --keep best --out rows.jsonl
    torchrun --nproc-per-node 2 -m tune.cli generate ./model --prompts questions.txt --out answers.jsonl
    torchrun --nproc-per-node 2 -m tune.cli generate ./model --tp 2 --prompt "Why is the sky blue?"
    tune generate --launcher ray --nproc-per-node 2 ./model --prompts questions.jsonl --out answers.parquet
"""

import json
import math
import os
import shlex
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from tune.cli.model_options import MAX_NEW_TOKENS, add_arguments, dotted, opened
from tune.cli.recipes import parted
from tune.errors import TuneError, explained
from tune.launchers import count, ray
from tune.lookup import local_path
from tune.terminal import visible

OWN = ("index", "sample", "completion", "finish", "tokens")  # columns added to those of the rows
QUICK = 10.0  # seconds; slower answers are written in smaller groups


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    add_arguments(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt (default: prompts from standard input)")
    file = "one prompt per line (.txt), or rows with prompt or messages (.jsonl, .csv, .parquet)"
    prompts.add_argument("--prompts", metavar="FILE", help=file)
    parser.add_argument("--samples", metavar="N", type=count, default=1, help="answers to each prompt (default: 1)")
    score = "your function (row, answer) that scores each answer, like a GRPO reward"
    parser.add_argument("--score", metavar="my.f", help=score)
    keep = "write conversations to train on: with all answers, or with the best one for each prompt"
    parser.add_argument("--keep", choices=("best", "all"), help=keep)
    parser.add_argument("--min-score", metavar="X", type=float, help="keep answers with at least this score")
    parser.add_argument("--raw", action="store_true", help="continue texts without a chat template")
    parser.add_argument(
        "--out", metavar="FILE", type=local_path, help="also write prompts and answers, as .jsonl or .parquet"
    )
    parser.add_argument("--batch-size", metavar="N", type=count, default=16, help="answers at a time (default: 16)")
    parser.add_argument("--launcher", choices=["ray"], help="its options: tune generate --launcher ray --help")
    launcher, others = parted(arguments, "")
    actors = None
    if launcher == "ray":
        actors, arguments = ray.parser("tune generate --launcher ray").parse_known_args(others)
    options, rest = parser.parse_known_args(arguments)
    if rest and not rest[0].startswith("-"):
        parser.error(f"{rest[0]}: begin the prompt with its option: --prompt {shlex.quote(' '.join(rest))}")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if actors and options.tp > 1:
        parser.error("--tp: each Ray actor holds the whole model. Use torchrun to share it")
    if options.prompt is None and options.prompts is None and sys.stdin.isatty():
        parser.error("no prompts: add --prompt TEXT, --prompts FILE, or use standard input")
    from tune.datasets import placed_rows

    if options.out and options.out.suffix.lower() in (".csv", ".tsv", ".arrow", ".txt"):
        parser.error(f"--out {options.out}: answers are written as .jsonl or .parquet, not as {options.out.suffix}")
    if options.out:
        with explained(f"--out {options.out} cannot be written", OSError):  # before the model is loaded
            options.out.parent.mkdir(parents=True, exist_ok=True)
            if options.out.is_dir():
                raise IsADirectoryError("it is a folder")
            require_answers(options.out)
    require_rows(parser, options)
    given = [("--prompt", {"prompt": options.prompt})]
    rows = placed_rows(options.prompts, "--prompts") if options.prompt is None else given
    generate(options, rows, actors)


class Answerer:
    """Answer rows by their numbers. The constructor opens the model and reports errors in the model and rows."""

    def __init__(self, options: Namespace, rows: list[tuple[str, Any]]):
        from tune import distributed
        from tune.datasets import open_prompts
        from tune.generation import Sampler

        self.world, self.samples = distributed.init(options.device, tp=options.tp), options.samples
        self.model, self.tokenizer, settings = opened(options, self.world, self.tell)
        if self.samples > 1 and options.temperature is None and not settings["temperature"]:
            raise TuneError(f"--samples {self.samples}: greedy decoding gives equal answers. Add --temperature 1")
        self.prompts = open_prompts(self.tokenizer, rows, system=options.system, raw=options.raw)
        self.given = options.max_new_tokens
        self.sampler = Sampler(max_new_tokens=self.given or 1, max_rows=options.batch_size, **settings)
        self.sampler.check(self.model, [each.tokens for each in self.prompts], [f"of {place}" for place, _ in rows])

    def __call__(self, numbers: range) -> list[tuple[Any, list[Any]]]:
        """Return the prompts of these numbers, each with its answers."""
        from tune.generation import answer

        asked: dict[int, dict[int, list[int]]] = {}  # by the most tokens of an answer
        for number in numbers:
            tokens = self.prompts[number].tokens
            room = (self.model.max_generated or sys.maxsize) - len(tokens)
            asked.setdefault(self.given or min(MAX_NEW_TOKENS, room), {})[number] = tokens
        found: dict[int, list[Any]] = {}
        for most, prompts in asked.items():
            sampler = replace(self.sampler, max_new_tokens=most)
            found |= answer(self.model, sampler, self.tokenizer, prompts, self.world, self.samples)
        return [(self.prompts[number], found[number]) for number in numbers]

    def tell(self, message: str) -> None:
        if self.world.is_main:
            print(visible(message), file=sys.stderr, flush=True)


def generate(options: Namespace, rows: list[tuple[str, Any]], actors: Namespace | None = None) -> None:
    """Print and write the answers to all rows in order, a few batches at a time. `actors` are Ray's options."""
    if options.out and options.prompts and options.out.exists() and options.out.samefile(options.prompts):
        raise TuneError(f"--out {options.out} is the prompts file and would be overwritten. Name another file")
    out, size = sys.stdout, 4 * options.batch_size
    if actors and not actors.local:
        parts = shares(len(rows), min(size, -(-len(rows) // (actors.nnodes[1] * actors.nproc_per_node))))
        with redirect_stdout(sys.stderr), ray.in_actors(actors, partial(Answerer, options, rows), parts) as found:
            write(options, rows, zip(parts, found, strict=True), out)  # and not what Ray itself prints
        return
    answers = Answerer(options, rows)
    answered = ((part, answers(part)) for part in turns(len(rows), options.batch_size, answers.world))
    if answers.world.is_main:
        write(options, rows, answered, out)
    else:
        deque(answered, maxlen=0)
    answers.world.finish()


def shares(count: int, size: int) -> list[range]:
    """Split the numbers below `count` into ranges of `size`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def require_rows(parser: ArgumentParser, options: Namespace) -> None:
    """End the command if answers cannot be kept or the score function is missing."""
    if options.keep and (options.out is None or options.out.suffix.lower() == ".parquet"):
        parser.error("--keep: conversations are written as JSON lines. Name a file, --out rows.jsonl")
    if (options.keep == "best" or options.min_score is not None) and not options.score:
        option = "--keep best" if options.keep == "best" else "--min-score"
        parser.error(f"{option} needs --score FILE.FUNCTION, your function (row, answer) that returns a number")
    if options.min_score is not None and not options.keep:
        parser.error("--min-score: add --keep all or --keep best, to choose among these answers")
    if options.min_score is not None and not math.isfinite(options.min_score):
        parser.error(f"--min-score {options.min_score}: set a finite number")
    if options.score:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        scoring(options.score)


def turns(count: int, size: int, world: Any) -> Iterator[range]:
    """Yield ranges below `count`: `size` numbers per model at a time, or four times as many if answers are quick."""
    start, least = 0, size * world.data_size
    size = least
    while start < count:
        began = time.perf_counter()
        yield range(start, min(start + size, count))
        start += size
        size = 4 * least if world.broadcast(time.perf_counter() - began) < QUICK * size / least else least


def is_given(value: Any) -> bool:
    return value is not None and value != "" and value != []


def write(options: Namespace, rows: list[tuple[str, Any]], answers: Iterable[tuple[range, Any]], out: TextIO) -> None:
    """Print the `answers` to `out` and write them as they arrive."""
    begin, tokens = time.perf_counter(), 0
    score = scoring(options.score) if options.score else None
    kept, left_out = 0, Counter[str]()
    with (
        nullcontext(lambda records: None)
        if options.out is None
        else records_file(options.out, rows, bool(score)) as put
    ):
        for numbers, found in answers:
            records = [
                {
                    "index": number, "sample": sample,
                    **{name: value for name, value in rows[number][1].items() if name not in OWN and is_given(value)},
                    "completion": completion.text, "finish": completion.finish, "tokens": len(completion.tokens),
                    **({"score": score(rows[number][1], completion.text)} if score else {}),
                }
                for number, (_, completions) in zip(numbers, found, strict=True)
                for sample, completion in enumerate(completions)
            ]  # fmt: skip
            for record in records:
                # A file or a program gets the answer as it is.
                answer = visible(record["completion"]) if out.isatty() else record["completion"]
                print(answer, file=out, flush=True)
            if options.keep:
                prompts = {number: prompt for number, (prompt, _) in zip(numbers, found, strict=True)}
                reasons = [why_not(record, options) for record in records]
                left_out.update(filter(None, reasons))
                usable = [record for record, reason in zip(records, reasons, strict=True) if not reason]
                usable = best_of_each(usable) if options.keep == "best" else usable
                put([as_row(prompts[each["index"]], each) for each in usable])
                kept += len(usable)
            else:
                put(records)
            tokens += sum(record["tokens"] for record in records)
            rate = tokens / (time.perf_counter() - begin)
            told = f"{numbers.stop:,} of {len(rows):,} prompts, {tokens:,} tokens, {rate:.1f} tokens/s"
            print(told, file=sys.stderr, flush=True)
    if options.keep:
        details = "".join(f"; {count:,} left out: {reason}" for reason, count in left_out.items())
        print(f"kept {kept:,} of {len(rows) * options.samples:,} answers{details}", file=sys.stderr, flush=True)


def scoring(path: str) -> Callable[[Any, str], float]:
    """The function of the user that scores an answer to a row. Raises TuneError if there is none."""
    from tune.config import instantiate_weighted
    from tune.generation import Reward

    ((name, function, weight),) = instantiate_weighted(dotted(path), "--score")
    return Reward(name, function, weight, "--score")


def why_not(record: dict[str, Any], options: Namespace) -> str:
    """Return why an answer is not kept, or "": a model would learn to end there, or to say nothing."""
    if record["finish"] != "stop":
        return "without an end (give more --max-new-tokens)"
    if not record["completion"].strip():
        return "empty"
    if options.min_score is not None and record["score"] < options.min_score:
        return f"below --min-score {options.min_score:g}"
    return ""


def best_of_each(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answer with the highest score to each prompt, and the first of equal ones."""
    best: dict[int, dict[str, Any]] = {}
    for each in records:
        if each["index"] not in best or each["score"] > best[each["index"]]["score"]:
            best[each["index"]] = each
    return [*best.values()]


def as_row(prompt: Any, record: dict[str, Any]) -> dict[str, Any]:
    """Return a row to train on: the prompt with its answer. Earlier answers, which have no score, are not learned."""
    row: dict[str, Any] = {name: record[name] for name in ("index", "sample", "score") if name in record}
    if prompt.messages is None:
        return row | {"prompt": prompt.row["prompt"], "completion": record["completion"]}
    context = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in prompt.messages]
    context = [{name: value for name, value in each.items() if name != "train"} for each in context]
    row["messages"] = [*context, {"role": "assistant", "content": record["completion"]}]
    return row | ({"tools": prompt.tools} if prompt.tools else {})


def require_answers(path: Path) -> None:
    """Raise TuneError if the file at `path`, which answers will replace, holds anything but answers."""
    if not path.is_file() or not path.stat().st_size:
        return
    import pyarrow
    from pyarrow import parquet

    columns: Any = None
    with suppress(ValueError, pyarrow.ArrowException):  # of files in another format
        if path.suffix.lower() == ".parquet":
            columns = parquet.read_schema(path).names
        else:
            with path.open(encoding="utf-8") as lines:
                columns = json.loads(lines.readline())
    names = {*map(str, columns)} if isinstance(columns, list | dict) else set()
    if not {"index", "sample"} <= names or not {"completion", "messages"} & names:
        raise TuneError(f"--out {path} holds other data, which would be overwritten. Name another file")


@contextmanager
def records_file(
    path: Path, rows: list[tuple[str, Any]], has_scores: bool
) -> Iterator[Callable[[list[dict[str, Any]]], object]]:
    """Yield a function that writes records: as JSON lines (dates as text), or as Parquet if the file's suffix says so.

    Parquet columns have their types in `rows`. Raises TuneError if the file cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    file: Any
    mixed = explained(f"--out {path}: a prompt column has mixed types. Write a .jsonl instead", pyarrow.ArrowException)
    with mixed, explained(f"--out {path} cannot be written", OSError):
        if path.suffix.lower() == ".parquet":
            names = dict.fromkeys(name for _, row in rows for name in row if name not in OWN and is_given(row[name]))
            given = {name: [row[name] if is_given(row.get(name)) else None for _, row in rows] for name in names}
            asked = {name: pyarrow.array(values).type for name, values in given.items()}
            ends = {"completion": pyarrow.string(), "finish": pyarrow.string(), "tokens": pyarrow.int64()}
            ends |= {"score": pyarrow.float64()} if has_scores else {}
            schema = pyarrow.schema({"index": pyarrow.int64(), "sample": pyarrow.int64(), **asked, **ends})
            file = parquet.ParquetWriter(path, schema)
        else:
            file = path.open("a", encoding="utf-8")  # keeps old content until the first answer
    with file:
        if path.suffix.lower() == ".parquet":
            yield lambda records: file.write_table(pyarrow.Table.from_pylist(records, schema))
        else:
            is_begun = False

            def write_lines(records: list[dict[str, Any]]) -> None:
                nonlocal is_begun
                if not is_begun:
                    file.truncate(0)
                    is_begun = True
                file.writelines(json.dumps(each, ensure_ascii=False, default=str) + "\n" for each in records)

            yield write_lines
            write_lines([])  # makes the file empty if nothing was kept
