"""Answer prompts with a model, an adapter or a run: MODEL is the folder of one. Answers go to standard output, all else
to standard error; under torchrun the prompts are shared by its processes, with Ray by its actors.

    tune generate runs/mine --prompt "Why is the sky blue?"
    tune generate ./model --adapter ./adapter --prompts questions.jsonl --out answers.jsonl
    torchrun --nproc-per-node 2 -m tune.cli generate ./model --prompts questions.txt --out answers.jsonl
    torchrun --nproc-per-node 2 -m tune.cli generate ./model --tp 2 --prompt "Why is the sky blue?"
    tune generate --launcher ray --nproc-per-node 2 ./model --prompts questions.jsonl --out answers.parquet
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from tune.cli.model_options import MAX_NEW_TOKENS, add_arguments, opened
from tune.cli.recipes import parted
from tune.errors import TuneError, explained
from tune.launchers import count, ray
from tune.lookup import local_path

OWN = ("index", "sample", "completion", "finish", "tokens")  # columns of records, beside those of the rows
QUICK = 10.0  # seconds: where so many answers take longer, fewer are computed before they are written


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    add_arguments(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", help="without this and --prompts: standard input, as FILE")
    file = "a prompt a line (.txt), or rows with prompt or messages (.jsonl, .csv, .parquet)"
    prompts.add_argument("--prompts", metavar="FILE", help=file)
    parser.add_argument("--samples", metavar="N", type=count, default=1, help="answers to each prompt (default: 1)")
    parser.add_argument("--raw", action="store_true", help="go on from texts as they are, without a chat template")
    parser.add_argument("--out", metavar="FILE", type=local_path, help="prompts and answers too, as .jsonl or .parquet")
    parser.add_argument("--batch-size", metavar="N", type=count, default=16, help="answers at a time (default: 16)")
    parser.add_argument("--launcher", choices=["ray"], help="its options: tune generate --launcher ray --help")
    launcher, others = parted(arguments, "")
    actors = None
    if launcher == "ray":
        actors, arguments = ray.parser("tune generate --launcher ray").parse_known_args(others)
    options = parser.parse_args(arguments)
    if actors and options.tp > 1:
        parser.error("--tp: an actor of Ray has the whole model; start processes that share it with torchrun")
    if options.prompt is None and options.prompts is None and sys.stdin.isatty():
        parser.error("give --prompt TEXT, --prompts FILE, or prompts on standard input")
    from tune.datasets import placed_rows

    if options.out and options.out.suffix.lower() in (".csv", ".tsv", ".arrow", ".txt"):
        parser.error(f"--out {options.out}: answers are written as .jsonl or .parquet, not as {options.out.suffix}")
    if options.out:
        with explained(f"--out {options.out} cannot be written", OSError):  # before the model is loaded
            options.out.parent.mkdir(parents=True, exist_ok=True)
            if options.out.is_dir():
                raise IsADirectoryError("it is a folder")
            require_answers(options.out)
    given = [("--prompt", {"prompt": options.prompt})]
    rows = placed_rows(options.prompts, "--prompts") if options.prompt is None else given
    generate(options, rows, actors)


class Answerer:
    """Answers rows by their numbers. Opens the model, and finds at once what is wrong with it and with the rows."""

    def __init__(self, options: Namespace, rows: list[tuple[str, Any]]):
        from tune import distributed
        from tune.datasets import open_prompts
        from tune.generation import Sampler

        self.world, self.samples = distributed.init(options.device, tp=options.tp), options.samples
        self.model, self.tokenizer, settings = opened(options, self.world, self.tell)
        if self.samples > 1 and options.temperature is None and not settings["temperature"]:
            raise TuneError(f"--samples {self.samples}: the most likely answer is always the same; add --temperature 1")
        self.prompts = open_prompts(self.tokenizer, rows, system=options.system, raw=options.raw)
        longest = max(len(prompt.tokens) for prompt in self.prompts)
        room = max(1, min(MAX_NEW_TOKENS, (self.model.max_generated or sys.maxsize) - longest))
        count = room if options.max_new_tokens is None else options.max_new_tokens
        self.sampler = Sampler(max_new_tokens=count, max_rows=options.batch_size, **settings)
        self.sampler.check(self.model, [each.tokens for each in self.prompts], [f"of {place}" for place, _ in rows])

    def __call__(self, numbers: range) -> list[list[Any]]:
        from tune.generation import answer

        asked = {number: self.prompts[number].tokens for number in numbers}
        found = answer(self.model, self.sampler, self.tokenizer, asked, self.world, self.samples)
        return [found[number] for number in numbers]

    def tell(self, message: str) -> None:
        if self.world.is_main:
            print(message, file=sys.stderr, flush=True)


def generate(options: Namespace, rows: list[tuple[str, Any]], actors: Namespace | None = None) -> None:
    """Print and write the answers to all rows, in their order, some batches at a time; `actors` are Ray's options."""
    if options.out and options.prompts and options.out.exists() and options.out.samefile(options.prompts):
        raise TuneError(f"--out {options.out} is the file of the prompts, which would be lost. Name another file")
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
    """The numbers below `count`, so many at a time."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def turns(count: int, size: int, world: Any) -> Iterator[range]:
    """The numbers below `count`: `size` for each model at a time, four times as many where these are quick."""
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
    """Print to `out`, and write, the `answers` to the rows of these numbers as they come."""
    begin, tokens = time.perf_counter(), 0
    with nullcontext(lambda records: None) if options.out is None else records_file(options.out, rows) as put:
        for numbers, found in answers:
            records = [
                {
                    "index": number, "sample": sample,
                    **{name: value for name, value in rows[number][1].items() if name not in OWN and is_given(value)},
                    "completion": completion.text, "finish": completion.finish, "tokens": len(completion.tokens),
                }
                for number, completions in zip(numbers, found, strict=True)
                for sample, completion in enumerate(completions)
            ]  # fmt: skip
            for record in records:
                print(record["completion"], file=out, flush=True)
            put(records)
            tokens += sum(record["tokens"] for record in records)
            rate = tokens / (time.perf_counter() - begin)
            told = f"{numbers.stop:,} of {len(rows):,} prompts, {tokens:,} tokens, {rate:.1f} tokens/s"
            print(told, file=sys.stderr, flush=True)


def require_answers(path: Path) -> None:
    """Raises TuneError if there is a file at `path` that holds something else than answers: they replace it."""
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
    if not isinstance(columns, list | dict) or not {"index", "sample", "completion"} <= {*map(str, columns)}:
        raise TuneError(f"--out {path} holds no answers of `tune generate`, but data which would be lost. Name another")


@contextmanager
def records_file(path: Path, rows: list[tuple[str, Any]]) -> Iterator[Callable[[list[dict[str, Any]]], object]]:
    """A function that writes records: as JSON lines (dates as text), or as Parquet if that is the file's suffix, whose
    columns have the types that they have in all `rows`. Raises TuneError if it cannot be written."""
    import pyarrow
    from pyarrow import parquet

    file: Any
    mixed = explained(f"--out {path}: write a .jsonl, as what is asked has no common type", pyarrow.ArrowException)
    with mixed, explained(f"--out {path} cannot be written", OSError):
        if path.suffix.lower() == ".parquet":
            names = dict.fromkeys(name for _, row in rows for name in row if name not in OWN and is_given(row[name]))
            given = {name: [row[name] if is_given(row.get(name)) else None for _, row in rows] for name in names}
            asked = {name: pyarrow.array(values).type for name, values in given.items()}
            ends = {"completion": pyarrow.string(), "finish": pyarrow.string(), "tokens": pyarrow.int64()}
            schema = pyarrow.schema({"index": pyarrow.int64(), "sample": pyarrow.int64(), **asked, **ends})
            file = parquet.ParquetWriter(path, schema)
        else:
            file = path.open("w", encoding="utf-8")
    with file:
        if path.suffix.lower() == ".parquet":
            yield lambda records: file.write_table(pyarrow.Table.from_pylist(records, schema))
        else:
            yield lambda records: file.writelines(
                json.dumps(each, ensure_ascii=False, default=str) + "\n" for each in records
            )
