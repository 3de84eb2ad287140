import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.accounting import Accounting
from tune.datasets.cache import cache_folder, content_of, key_of, prepared
from tune.datasets.dataset import Dataset
from tune.datasets.formats import Format, Text, recognise, renamed, text
from tune.datasets.samples import Part, part
from tune.datasets.sources import Source, open_source
from tune.datasets.workers import map_chunks
from tune.errors import TuneError
from tune.tokenizers import Encoding, Tokenizer
from tune.types import PositiveInt

BATCH = 512  # texts tokenised together, on all cores


def load(
    tokenizer: Tokenizer,
    path: str,
    split: str = "train",
    *,
    max_seq_len: int,
    packed: bool = False,
    columns: Mapping[str, str] | None = None,
    subset: str | None = None,
    cache_dir: str | None = None,
    workers: PositiveInt | None = None,
) -> Dataset:
    """Tokenises a dataset: a .json, .jsonl, .csv or .parquet file, a folder of them, or a name on the hub.

    `columns` gives the data's names for the columns of a format ({"prompt": "question", "completion": "answer"});
    `subset` is one of a hub dataset's configurations. Mistaken rows raise TuneError with their places; rows of no use
    are dropped and counted in `.accounting`.

    What it makes is kept in `cache_dir` (default: $TUNE_CACHE or ~/.cache/tune) and used again for the same content,
    tokenizer and options. `workers` is the number of processes that tokenise; None: one for each core.
    """
    source = open_source(path, split, subset)
    accounting = Accounting(source.name, source.ignored_files)
    names = dict(columns or {})
    folder = cache_folder(cache_dir)
    content = content_of(source.files, folder) if source.files else _content_of_rows(open_source(path, split, subset))
    key = key_of(content, tokenizer.fingerprint, max_seq_len, names)
    samples = prepared(
        lambda: map_chunks(_reader(source, tokenizer, names, max_seq_len), source.rows, workers),
        key, max_seq_len, accounting, folder,
    )  # fmt: skip
    return Dataset(samples, accounting, max_seq_len if packed else None)


def _content_of_rows(source: Source) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for _, row in source.rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()


def _reader(
    source: Source, tokenizer: Tokenizer, columns: dict[str, str], max_seq_len: int
) -> Callable[[list[tuple[str, Any]]], Part]:
    """What makes samples of rows, whose format the first one decides."""
    first = []
    format: tuple[str, ...] = ("text",)
    read: Format = text
    for place, row in source.rows:
        first.append((place, row))
        if isinstance(row, dict):
            format, read = recognise(row, columns, place)
            break
    source.rows = chain(first, source.rows)
    if format == ("messages",):
        tokenizer.require_chat_template()
    return partial(_part, tokenizer, format, read, columns, max_seq_len)


def _part(
    tokenizer: Tokenizer,
    format: tuple[str, ...],
    read: Format,
    columns: dict[str, str],
    max_seq_len: int,
    rows: list[tuple[str, Any]],
) -> Part:
    accounting = Accounting()
    mistakes: list[str] = []
    texts = _texts(rows, tokenizer, format, read, columns, accounting, mistakes)
    made = part(_samples(texts, tokenizer), max_seq_len, accounting)
    made.mistakes = mistakes
    return made


def _texts(
    rows: list[tuple[str, Any]],
    tokenizer: Tokenizer,
    format: tuple[str, ...],
    read: Format,
    columns: dict[str, str],
    accounting: Accounting,
    mistakes: list[str],
) -> Iterator[Text]:
    for place, row in rows:
        try:
            text = read(renamed(row, format, columns), tokenizer)
            if isinstance(text, Text):
                text.text.encode()
        except TuneError as error:
            mistakes.append(f"{place}: {error}")
        except UnicodeEncodeError:
            mistakes.append(f"{place}: the text holds half of a character pair (a lone \\ud800-\\udfff escape)")
        else:
            if isinstance(text, str):
                accounting.rows += 1
                accounting.dropped[text] += 1
            else:
                yield text


def _samples(texts: Iterator[Text], tokenizer: Tokenizer) -> Iterator[Sample]:
    while batch := list(islice(texts, BATCH)):
        encodings = tokenizer.encode_with_offsets([text.text for text in batch])
        yield from (_sample(text, encoding, tokenizer) for text, encoding in zip(batch, encodings, strict=True))


def _sample(text: Text, encoding: Encoding, tokenizer: Tokenizer) -> Sample:
    ids, prefix = encoding.ids, []
    if text.plain:
        prefix = tokenizer.prefix_ids
        prefix = prefix if ids[: len(prefix)] != prefix else []  # the text has it already
        if ids[-1:] != [tokenizer.eos_id]:
            ids = [*ids, _eos(tokenizer)]
    tokens = np.array(prefix + ids, dtype=np.int32)
    labels = np.full(len(tokens), IGNORE, dtype=np.int32)
    for start, end in text.spans:
        first = max(1, bisect_right(encoding.offsets, start, key=itemgetter(1)) + len(prefix))
        last = bisect_left(encoding.offsets, end, key=itemgetter(0)) + len(prefix)
        if first < last:
            labels[first - 1 : last - 1] = tokens[first:last]
    if text.plain:
        labels[-2:-1] = tokens[-1]
    return Sample(tokens, labels)


def _eos(tokenizer: Tokenizer) -> int:
    if tokenizer.eos_id is None:
        raise TuneError(
            f"the tokenizer in {tokenizer.path} names no eos_token, and a model learns from it where a text ends: "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer.eos_id
