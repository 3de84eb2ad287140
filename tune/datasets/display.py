"""Show a dataset before training: its text with the supervised tokens marked, and its lengths."""

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.dataset import Dataset
from tune.datasets.mix import Mixture
from tune.datasets.stream import Stream
from tune.terminal import visible
from tune.tokenizers import Tokenizer

MARKS = "⟦⟧"  # around supervised text
BROKEN = 64  # tokens without a complete character, after which the text is shown as it is
STRETCHES, CHARACTERS = 12, 240  # `marked(short=True)` shows this many stretches, and characters of each


@dataclass(frozen=True)
class Document:
    """A sample and, for each token, the text that it adds and whether it is supervised.

    A character of several tokens is the text of the last one.
    """

    sample: Sample
    tokens: list[tuple[str, bool]]


def parts_of(dataset: Dataset | Mixture | Stream | None, name: str) -> dict[str, Dataset]:
    """The sources of a mixture as name/source, the first window of a stream, or the dataset itself."""
    parts = dataset.parts if dataset else {}
    return {f"{name}/{source}" if source else name: part for source, part in parts.items()}


def first_rows(dataset: Dataset | Mixture | Stream, tokenizer: Tokenizer, number: int = 1) -> list[list[Document]]:
    """The documents of the first training rows, in source order."""
    part = next(iter(dataset.parts.values()))
    return [[document(each, tokenizer) for each in part.row(index)] for index in range(min(number, len(part)))]


def document(sample: Sample, tokenizer: Tokenizer) -> Document:
    """A sample as text, token by token, with control characters escaped."""
    stream = tokenizer.stream()
    texts: list[str] = []
    waiting = 0
    for token in sample.tokens.tolist():
        text = stream.add(token)
        waiting = 0 if text else waiting + 1
        # The stream decodes all tokens of an incomplete character again for each further token.
        if waiting == BROKEN:
            text, waiting = stream.finish(), 0
        texts.append(text)
    texts[-1] += stream.finish()
    learned = [False, *(np.asarray(sample.labels)[:-1] != IGNORE).tolist()]
    return Document(sample, [*zip(map(visible, texts), learned, strict=True)])


def marked(document: Document, short: bool = False) -> str:
    """A document as plain text with `MARKS` around supervised text; `short` abbreviates long documents."""
    stretches = [
        (is_learned, "".join(text for text, _ in tokens))
        for is_learned, tokens in groupby(document.tokens, key=itemgetter(1))
    ]
    kept = stretches[:STRETCHES] if short else stretches
    pieces = []
    for is_learned, text in kept:
        if short and len(text) > 2 * CHARACTERS:
            left_out = f" [... {len(text) - CHARACTERS:,} characters ...] "
            text = text[: CHARACTERS // 2] + left_out + text[-CHARACTERS // 2 :]
        pieces.append(f"{MARKS[0]}{text}{MARKS[1]}" if is_learned else text)
    if len(kept) < len(stretches):
        pieces.append(f" [... {sum(len(text) for _, text in stretches[STRETCHES:]):,} characters]")
    return "".join(pieces)


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Count samples by length in ranges that double: (first, last, samples)."""
    exponents = np.ceil(np.log2(lengths)).astype(int)
    counts = np.bincount(exponents)
    return [
        (2 ** (exponent - 1) + 1 if exponent else 1, 2**exponent, int(counts[exponent]))
        for exponent in range(exponents.min(), len(counts))
    ]
