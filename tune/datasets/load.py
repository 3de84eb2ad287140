from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import itemgetter

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.accounting import Accounting
from tune.datasets.dataset import Dataset
from tune.datasets.formats import Text, recognise, renamed
from tune.datasets.sources import Source, open_source
from tune.errors import TuneError
from tune.tokenizers import Encoding, Tokenizer

MISTAKES_SHOWN = 5
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
) -> Dataset:
    """Tokenises a dataset: a .json, .jsonl, .csv or .parquet file, a folder of them, or a name on the hub.

    `columns` gives the data's names for the columns of a format ({"prompt": "question", "completion": "answer"});
    `subset` is one of a hub dataset's configurations. Mistaken rows raise TuneError with their places; rows of no use
    are dropped and counted in `.accounting`.
    """
    source = open_source(path, split, subset)
    accounting = Accounting(source.name, source.ignored_files)
    texts = _texts(source, tokenizer, dict(columns or {}), accounting)
    return Dataset.from_samples(_samples(texts, tokenizer), max_seq_len, packed, accounting)


def _texts(source: Source, tokenizer: Tokenizer, columns: dict[str, str], accounting: Accounting) -> Iterator[Text]:
    format = None
    mistakes: list[str] = []
    for place, row in source.rows:
        if format is None and isinstance(row, dict):
            format, read = recognise(row, columns, place)
            if format == ("messages",):
                tokenizer.require_chat_template()
        try:
            row = renamed(row, format or (), columns)
            text = read(row, tokenizer)
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
            elif not mistakes:
                accounting.endless += text.endless
                yield text
        if len(mistakes) == MISTAKES_SHOWN:
            break
    if mistakes:
        first = f"the first {MISTAKES_SHOWN} rows" if len(mistakes) == MISTAKES_SHOWN else "rows"
        raise TuneError("\n  ".join([f"{source.name}: {first} that cannot be used:", *mistakes]))


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
