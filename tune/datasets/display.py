"""A dataset for people to look at before training: its text with the learned tokens, its lengths."""

import re
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from tune.collators import IGNORE, Sample
from tune.datasets.dataset import Dataset
from tune.datasets.mix import Mixture
from tune.datasets.stream import Stream
from tune.tokenizers import Tokenizer

MARKS = "⟦⟧"  # around what is learned, in plain text
STRETCHES, CHARACTERS = 12, 240  # that `marked` shows of a document, and of each stretch of it, in short

# A carriage return that is not meant should be seen, and a row must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Document:
    """A sample, and of each token the text that it adds (that of a character of several tokens is the last one's), and
    whether it is learned."""

    sample: Sample
    tokens: list[tuple[str, bool]]


def parts_of(dataset: Dataset | Mixture | Stream | None, name: str) -> dict[str, Dataset]:
    """A mixture's sources as name/source, of a stream its first window, or the dataset itself."""
    parts = dataset.parts if dataset else {}
    return {f"{name}/{source}" if source else name: part for source, part in parts.items()}


def first_rows(dataset: Dataset | Mixture | Stream, tokenizer: Tokenizer, number: int = 1) -> list[list[Document]]:
    """The documents of each of the first rows of what will be trained on, not in the order of training."""
    part = next(iter(dataset.parts.values()))
    return [[document(each, tokenizer) for each in part.row(index)] for index in range(min(number, len(part)))]


def document(sample: Sample, tokenizer: Tokenizer) -> Document:
    """A sample as it reads, token by token, with control characters written out."""
    stream = tokenizer.stream()
    texts = [stream.add(token) for token in sample.tokens.tolist()]
    texts[-1] += stream.finish()
    learned = [False, *(np.asarray(sample.labels)[:-1] != IGNORE).tolist()]
    visible = (_CONTROL.sub(lambda control: repr(control[0])[1:-1], text) for text in texts)
    return Document(sample, [*zip(visible, learned, strict=True)])


def marked(document: Document, short: bool = False) -> str:
    """A document as plain text with marks around what is learned; `short` leaves out the middle of long ones."""
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
    """Samples by length, each range twice as wide as the one before it: (first, last, samples)."""
    exponents = np.ceil(np.log2(lengths)).astype(int)
    counts = np.bincount(exponents)
    return [
        (2 ** (exponent - 1) + 1 if exponent else 1, 2**exponent, int(counts[exponent]))
        for exponent in range(exponents.min(), len(counts))
    ]
