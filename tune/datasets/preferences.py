"""Rows of preferences and of labelled answers, as samples."""

from dataclasses import dataclass

from tune.collators import Sample
from tune.datasets.formats import Row, recognise, renamed
from tune.datasets.formats.preferences import LABELLED, PREFERENCES
from tune.datasets.rows import TOO_LONG, RowReader


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, the better one first; only the answers are supervised."""

    chosen: Sample
    rejected: Sample


@dataclass(frozen=True, slots=True)
class Labelled:
    """An answer, and whether it is a good one."""

    sample: Sample
    is_good: bool


def preference_pairs(row: Row, reader: RowReader) -> list[Pair] | str:
    """The pairs of a row with `chosen` and `rejected` or ranked `completions`, or the reason why it has none.

    Pairs with a sample longer than the reader's `max_seq_len` are left out. Raises TuneError for a mistaken row.
    """
    format = recognise(row, reader.columns, "the row", PREFERENCES)
    contents = format.read(renamed(row, format, reader.columns))
    if isinstance(contents, str):
        return contents
    pairs = [Pair(reader.sample(better), reader.sample(worse)) for better, worse in contents]
    fitting = [pair for pair in pairs if max(len(pair.chosen.tokens), len(pair.rejected.tokens)) <= reader.max_seq_len]
    return fitting or TOO_LONG


def labelled_sample(row: Row, reader: RowReader) -> Labelled | str:
    """The sample of a row with `prompt`, `completion` and `label` (as KTO learns from), or why there is none."""
    format = recognise(row, reader.columns, "the row", LABELLED)
    content = format.read(renamed(row, format, reader.columns))
    if isinstance(content, str):
        return content
    sample = reader.sample(content[0])
    return Labelled(sample, content[1]) if len(sample.tokens) <= reader.max_seq_len else TOO_LONG
