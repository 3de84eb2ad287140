"""Show the data of a run before it starts: its first rows with learned tokens marked, packing, the counts of kept and
dropped rows, lengths, duplicates and likely mistakes. It reads the first 1,000 rows of each source, or all with --all,
which takes as long as `tune prepare`. It needs the tokenizer, but no weights and no GPU. It takes the arguments of
`tune run`. RECIPE may be a config; the recipe with its keys is then used."""

import io
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from tune.cli.recipes import data_of, parse_options, prompts_of, settings
from tune.collators import IGNORE
from tune.config import instantiate
from tune.datasets import MARKS, Stream, first_rows, histogram, marked, parts_of, warnings_about
from tune.errors import TuneError, explained
from tune.launchers import count
from tune.lookup import did_you_mean
from tune.terminal import visible

STYLES = {True: ("black on pale_green1", "black on pale_green3"), False: ("grey62", "grey50")}
FIRST = 1000  # rows of each source that are read
ONLY_FIRST = f"only the first {FIRST:,} rows of each source were read: --all reads all"
BAR = 40  # characters of the longest bar

# The browser wraps long lines, so that text copied from the page has no line breaks that the data lacks.
HTML = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>tune preview</title>
<style>{stylesheet} body {{ color: {foreground}; background: {background}; }}
pre {{ font-family: monospace; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 60rem; }}</style></head>
<body><pre>{code}</pre></body></html>
"""


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    run = "RECIPE [--config FILE_OR_NAME] [key=value ...]"
    parser.usage = f"tune preview {run} [--rows N] [--all] [--source NAME] [--html FILE]"
    parser.add_argument("--rows", metavar="N", type=count, default=3, help="show the first N rows (default: 3)")
    parser.add_argument(
        "--all", action="store_true", help=f"read all rows, not only the first {FIRST:,} of each source"
    )
    parser.add_argument("--source", metavar="NAME", help="only this: training, validation, or a source of a mixture")
    parser.add_argument("--html", metavar="FILE", help="write an HTML page instead")
    parser.add_argument("recipe", metavar="RECIPE")
    options, rest = parse_options(parser, arguments)
    cfg = settings(options.recipe, rest)
    if not options.all and str(cfg.dataset.get("_component_")).startswith("tune.datasets."):
        take_first(cfg.dataset)

    tokenizer = instantiate(cfg.tokenizer)
    if "max_prompt_len" in cfg:
        if options.html or options.source:
            raise TuneError("--html and --source need learned tokens, and prompts have none. Leave them out")
        for name, found in prompts_of(cfg, tokenizer).items():
            print(visible(f"{name}: {found.table()}"))
            if len(found) == FIRST and not options.all:
                print(ONLY_FIRST)
            for prompt in found[: options.rows]:
                text = visible(tokenizer.decode(prompt.tokens))
                print(f"\nprompt {prompt.index}: {len(prompt.tokens):,} tokens\n{text}")
        return
    dataset, validation = data_of(cfg, tokenizer)
    training, held_out = parts_of(dataset, "training"), parts_of(validation, "validation")
    tables = [each.accounting.table() for each in (dataset, validation) if each]
    if options.source is not None:
        names = list(dict.fromkeys(chain.from_iterable(name.split("/") for name in training | held_out)))
        training, held_out = (
            {name: part for name, part in side.items() if options.source in (name, *name.split("/"))}
            for side in (training, held_out)
        )
        tables = [part.accounting.table() for part in (training | held_out).values()]
        if not tables:
            hint = did_you_mean(options.source, names)
            raise TuneError(f"--source {options.source}: there is no such part.{hint} The parts are {', '.join(names)}")

    shown = {name: (each, first_rows(each, tokenizer, options.rows)) for name, each in (training | held_out).items()}
    warnings = warnings_about(training, held_out, tokenizer)
    if isinstance(dataset, Stream):
        tables.append("a stream: only its first rows were read")
    elif not options.all and any(part.accounting.rows == FIRST for part in (training | held_out).values()):
        tables.append(ONLY_FIRST)
    console = Console()
    if options.html is not None:
        console = Console(
            file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor", no_color=False
        )
    colors = console.color_system is not None and not console.no_color
    for line in report(shown, tables, warnings, colors):
        if colors:
            console.print(line, soft_wrap=True)
        else:
            print(line.plain)
    if options.html is not None:
        with explained(f"--html {options.html} cannot be written", OSError):
            Path(options.html).parent.mkdir(parents=True, exist_ok=True)
            console.save_html(options.html, code_format=HTML, inline_styles=True)
        print(f"wrote {options.html}; warnings: {len(warnings)}")


def take_first(data: DictConfig) -> None:
    """Change the settings of data, with their sources and validation data, to read only the first rows."""
    if isinstance(data.get("validation"), str):
        OmegaConf.update(data, "validation", {"path": data.validation}, force_add=True)
    for part in (data, data.get("validation")):
        if isinstance(part, DictConfig) and part.get("take") is None and "sources" not in part:
            OmegaConf.update(part, "take", FIRST, force_add=True)
    for source in (data.get("sources") or {}).values():
        if isinstance(source, DictConfig):
            take_first(source)


def report(parts: dict[str, tuple], tables: list[str], warnings: list[str], colors: bool) -> Iterator[Text]:
    """Yield the lines of the report on datasets and their first rows; without colors, marks enclose learned tokens."""
    if colors:
        yield Text.assemble("tokens are ", ("learned", STYLES[True][0]), " or ", ("only read", STYLES[False][0]))
    else:
        yield Text(f"learned tokens are between {MARKS[0]} and {MARKS[1]}")
    for name, (dataset, rows) in parts.items():
        capacity = dataset.accounting.row_capacity
        for number, row in enumerate(rows, 1):
            tokens = sum(len(document.tokens) for document in row)
            packing = f", {tokens:,} of {capacity:,} tokens ({tokens / capacity:.1%} full)" if capacity else ""
            documents = f"{len(row)} documents" if len(row) > 1 else "1 document"
            yield Text(f"\n{name}, row {number}: {documents}{packing}", "bold")
            for document in row:
                is_learned = document.sample.labels != IGNORE
                said = f"{len(document.tokens):,} tokens, {np.count_nonzero(is_learned):,} learned"
                if document.sample.weights is not None:
                    said += f", total weight {document.sample.weights[is_learned].sum():,.1f}"
                yield Text(f"sample {document.sample.index}: {said}", "italic")
                # Two shades alternate to show token boundaries.
                pieces = ((text, STYLES[is_learned][at % 2]) for at, (text, is_learned) in enumerate(document.tokens))
                yield Text.assemble(*pieces) if colors else Text(marked(document))
        yield Text(f"\n{name}, tokens per sample", "bold")
        yield from map(Text, _bars(histogram(dataset.lengths)))
        yield Text(f"copies of another sample: {dataset.copies:,} of {len(dataset.lengths):,}")
    for table in tables:
        yield Text(visible(f"\n{table}"))
    yield Text("\nwarnings" if warnings else "\nno warnings", "bold")
    yield from (Text(visible(f"  {warning}"), "red") for warning in warnings)


def _bars(lengths: list[tuple[int, int, int]]) -> Iterator[str]:
    ranges = [f"{first:,} to {last:,}" if first < last else f"{last:,}" for first, last, _ in lengths]
    width, most = max(map(len, ranges)), max(number for _, _, number in lengths)
    for range_, (_, _, number) in zip(ranges, lengths, strict=True):
        yield f"  {range_:>{width}}  {'█' * -(-BAR * number // most)} {number:,}"
