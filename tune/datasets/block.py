"""Tokenized rows as flat arrays, in the length that they have: what the cache keeps of a piece of a source."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from tune.collators import IGNORE, Picture, Sample
from tune.datasets.accounting import NAMES_SHOWN, Accounting
from tune.datasets.parse.content import Chat, Content, Plain
from tune.datasets.reasons import CANNOT_BE_USED
from tune.errors import TuneError
from tune.tokenizers import PictureFile

# Bits of `RowBlock.flags`.
ENDS = 1  # the last supervised message ends a turn
SPLITS = 2  # a text without a prompt, which is split by default
CLIPPED = 4  # cut inside an answer
CHAT = 8
RENDERS = 16  # a conversation that can be cut after an earlier message; it is then rendered again
TURNS = 32  # a conversation that can be split between turns; the pieces are then rendered again


class Places(Protocol):
    """Names the rows of a piece of a source, as in messages."""

    def of(self, number: int) -> str:
        """The place of a row: "chats.jsonl:12"."""


@dataclass(frozen=True, slots=True)
class Example:
    """A content as one sample. `cut` tokens were left out of it; `joins`: the lengths of samples that it continues."""

    sample: Sample
    flags: int = ENDS
    remarks: Sequence[str] = ()
    cut: int = 0
    joins: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """A row's examples, or why it has none. `mistake`: why it cannot be used. `digest`: of its content, if any."""

    examples: Sequence[Example] = ()
    dropped: str | None = None
    mistake: str | None = None
    digest: int | None = None


@dataclass(frozen=True, eq=False)
class RowBlock:
    """The rows of a piece of a source. Arrays have a value per token, per sample or per row, as `KINDS` says.

    A row has `counts` samples in a run, none if it is dropped for a reason. `digests` are equal for equal tokens, and
    `contents` for equal rows.
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    weight: np.ndarray  # fp64: sum over a sample's supervised tokens
    digests: np.ndarray
    firsts: np.ndarray  # the position of the first label; -1: none
    flags: np.ndarray
    notes: np.ndarray  # the number of a sample's remarks in `remarks`
    cuts: np.ndarray  # tokens left out of a sample
    numbers: np.ndarray  # of a row in its piece, from 1
    counts: np.ndarray
    reasons: np.ndarray  # the number of a row's reason in `dropped`; 0: kept
    contents: np.ndarray
    is_object: np.ndarray
    weights: np.ndarray | None = None  # fp32, per token; None: 1
    columns: dict[str, np.ndarray] = field(default_factory=dict)  # per sample
    token_columns: dict[str, np.ndarray] = field(default_factory=dict)
    pictures: dict[str, np.ndarray] = field(default_factory=dict)  # see `_pictures_of`
    dropped: Sequence[str] = ("",)
    remarks: Sequence[Sequence[str]] = ((),)
    mistakes: Sequence[tuple[int, str]] = ()  # of the first rows that cannot be used: number, why
    joins: Sequence[tuple[int, Sequence[int]]] = ()  # of samples that continue others

    @cached_property
    def starts(self) -> np.ndarray:
        """The position in `tokens` where each sample begins, and the end of the last one."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def row_starts(self) -> np.ndarray:
        """The sample with which each row begins, and the number of samples."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    @property
    def rows(self) -> int:
        return len(self.counts)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, TokenizedRow]]) -> "RowBlock":
        """The block of rows, each with its number."""
        rows = list(rows)
        examples = [example for _, row in rows for example in row.examples]
        samples = [example.sample for example in examples]
        tokens = [np.asarray(sample.tokens, dtype=np.int32) for sample in samples]
        labels = [np.asarray(sample.labels, dtype=np.int32) for sample in samples]
        dropped = {"": 0, CANNOT_BE_USED: 1}
        remarks: dict[tuple[str, ...], int] = {(): 0}
        reasons = [dropped.setdefault(row.dropped or "", len(dropped)) for _, row in rows]
        notes = [remarks.setdefault((*example.remarks,), len(remarks)) for example in examples]
        targets = [np.flatnonzero(each != IGNORE) for each in labels]
        columns, token_columns = _columns_of(samples)
        weights = None
        if any(sample.weights is not None for sample in samples):
            weights = np.concatenate([sample.weights_or_ones for sample in samples])
        return cls(
            tokens=_joined(tokens, np.int32),
            labels=_joined(labels, np.int32),
            lengths=np.array([len(each) for each in tokens], np.int32),
            supervised=np.array([len(each) for each in targets], np.int32),
            weight=np.array([_weight(*each) for each in zip(samples, targets, strict=True)], np.float64),
            digests=np.array([digest_of(each.tokens, each.pictures) for each in samples], np.uint64),
            firsts=np.array([each[0] if len(each) else -1 for each in targets], np.int32),
            flags=np.array([example.flags for example in examples], np.uint8),
            notes=np.array(notes, np.uint32),
            cuts=np.array([example.cut for example in examples], np.int32),
            numbers=np.array([number for number, _ in rows], np.int64),
            counts=np.array([len(row.examples) for _, row in rows], np.int32),
            reasons=np.array(reasons, np.uint32),
            contents=np.array([row.digest or 0 for _, row in rows], np.uint64),
            is_object=np.array([row.digest is not None for _, row in rows], np.uint8),
            weights=weights,
            columns=columns,
            token_columns=token_columns,
            pictures=_pictures_of(samples),
            dropped=[*dropped],
            remarks=[*remarks],
            mistakes=[(number, row.mistake) for number, row in rows if row.mistake][:NAMES_SHOWN],
            joins=[(at, example.joins) for at, example in enumerate(examples) if example.joins],
        )

    @classmethod
    def joined(cls, blocks: "Sequence[RowBlock]") -> "RowBlock":
        """The rows of several blocks of one piece as one block."""
        if len(blocks) == 1:
            return blocks[0]
        dropped = {name: None for block in blocks for name in block.dropped}
        remarks = {(*names,): None for block in blocks for names in block.remarks}
        places = {name: at for at, name in enumerate(dropped)}, {names: at for at, names in enumerate(remarks)}

        def together(name: str) -> np.ndarray:
            return np.concatenate([getattr(block, name) for block in blocks])

        arrays = {name: together(name) for name in ARRAYS}
        arrays["reasons"] = np.concatenate(
            [np.array([places[0][name] for name in block.dropped], np.uint32)[block.reasons] for block in blocks]
        )
        arrays["notes"] = np.concatenate(
            [np.array([places[1][(*names,)] for names in block.remarks], np.uint32)[block.notes] for block in blocks]
        )
        weights = None
        if any(block.weights is not None for block in blocks):
            weights = np.concatenate([block.weights_or_ones for block in blocks])
        filled = [block for block in blocks if len(block.lengths)]
        before = np.cumsum([0, *(len(block.lengths) for block in blocks)]).tolist()
        return cls(
            **arrays,
            weights=weights,
            columns=_joined_columns([block.columns for block in filled]),
            token_columns=_joined_columns([block.token_columns for block in filled]),
            pictures=_joined_pictures(blocks),
            dropped=[*dropped],
            remarks=[*remarks],
            mistakes=[mistake for block in blocks for mistake in block.mistakes][:NAMES_SHOWN],
            joins=[
                (first + at, lengths)
                for first, block in zip(before, blocks, strict=False)
                for at, lengths in block.joins
            ],
        )

    @property
    def weights_or_ones(self) -> np.ndarray:
        return np.broadcast_to(np.float32(1), len(self.tokens)) if self.weights is None else self.weights

    def accounting(self, places: Places) -> Accounting:
        """The number of rows, and those that cannot be used."""
        bad = int((self.reasons == 1).sum())
        mistakes = [f"{places.of(number)}: {mistake}" for number, mistake in self.mistakes]
        return Accounting(rows=self.rows, dropped=Counter({CANNOT_BE_USED: bad}), mistakes=mistakes)

    def sample(self, at: int) -> Sample:
        """A sample, as views."""
        span = slice(self.starts[at], self.starts[at + 1])
        columns = {name: values[at] for name, values in self.columns.items()}
        columns |= {name: values[span] for name, values in self.token_columns.items()}
        weights = None if self.weights is None else self.weights[span]
        pictures = self.pictures_in(span)
        return Sample(self.tokens[span], self.labels[span], columns=columns, weights=weights, pictures=pictures)

    def before_picture(self, start: int, length: int) -> int:
        """The length of tokens that begin at `start` and are cut to `length`: a picture is left out as a whole."""
        for picture in self.pictures_in(slice(start, start + length)):
            if picture.start + picture.length > length:
                return picture.start
        return length

    def pictures_in(self, span: slice) -> tuple[Picture, ...]:
        """The pictures among some of the tokens, with their places in them."""
        if not self.pictures:
            return ()
        first, last = np.searchsorted(self.pictures["starts"], [span.start, span.stop]).tolist()
        pictures = []
        for at in range(first, last):
            begin, end = self.pictures["ends"][at : at + 2].tolist()
            file = _file_of(self.pictures["files"][begin:end].tobytes())
            start = int(self.pictures["starts"][at]) - span.start
            pictures.append(Picture(file, int(self.pictures["digests"][at]), start, int(self.pictures["lengths"][at])))
        return tuple(pictures)

    def as_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The arrays by name and the rest as JSON, to store them; `from_arrays` is the way back."""
        arrays = {name: getattr(self, name) for name in ARRAYS}
        if self.weights is not None:
            arrays["weights"] = self.weights
        arrays |= {f"column-{name}": values for name, values in self.columns.items()}
        arrays |= {f"token-column-{name}": values for name, values in self.token_columns.items()}
        arrays |= {f"picture-{name}": values for name, values in self.pictures.items()}
        rest = {name: getattr(self, name) for name in ("dropped", "remarks", "mistakes", "joins")}
        return arrays, rest | {"columns": [*self.columns], "token_columns": [*self.token_columns]}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any], rest: dict[str, Any]) -> "RowBlock":
        columns = {name: arrays.pop(f"column-{name}") for name in rest.pop("columns")}
        token_columns = {name: arrays.pop(f"token-column-{name}") for name in rest.pop("token_columns")}
        pictures = {name: arrays.pop(f"picture-{name}") for name in PICTURES if f"picture-{name}" in arrays}
        return cls(**arrays, **rest, columns=columns, token_columns=token_columns, pictures=pictures)


ARRAYS = (
    *("tokens", "labels"),
    *("lengths", "supervised", "weight", "digests", "firsts", "flags", "notes", "cuts"),
    *("numbers", "counts", "reasons", "contents", "is_object"),
)


PICTURES = ("starts", "lengths", "digests", "ends", "files")


def flags_of(content: Content, ends: bool) -> int:
    """The `RowBlock.flags` of a content; `ends`: its last supervised message ends a turn."""
    flags = ENDS if ends else 0
    if isinstance(content, Plain) and not content.prompt:
        flags |= SPLITS
    if isinstance(content, Chat):
        flags |= CHAT
        if any(message["train"] for message in content.messages[:-1]):
            flags |= RENDERS
        if sum(message["role"] == "user" for message in content.messages) > 1:
            flags |= TURNS
    return flags


def digest_of(tokens: np.ndarray, pictures: Sequence[Picture] = ()) -> int:
    """A number that is equal for equal tokens (int32) with equal pictures."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=8)
    for picture in pictures:
        digest.update(picture.digest.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def _pictures_of(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """The pictures of samples as arrays; empty if there are none.

    The position in the tokens of the block at which each picture starts, its length in tokens, and the digest of its
    file. `files` joins what `_text_of` gives of each file, which ends before `ends[i + 1]`.
    """
    if not any(sample.pictures for sample in samples):
        return {}
    starts, lengths, digests, files, before = [], [], [], [], 0
    for sample in samples:
        for picture in sample.pictures:
            starts.append(before + picture.start)
            lengths.append(picture.length)
            digests.append(picture.digest)
            files.append(_text_of(picture.file))
        before += len(sample.tokens)
    return {
        "starts": np.array(starts, np.int64),
        "lengths": np.array(lengths, np.int32),
        "digests": np.array(digests, np.uint64),
        "ends": np.cumsum([0, *map(len, files)], dtype=np.int64),
        "files": np.frombuffer(b"".join(files), np.uint8),
    }


def _joined_pictures(blocks: "Sequence[RowBlock]") -> dict[str, np.ndarray]:
    if not any(block.pictures for block in blocks):
        return {}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in PICTURES}
    parts["ends"].append(np.zeros(1, np.int64))
    tokens = size = 0
    for block in blocks:
        if block.pictures:
            for name in ("lengths", "digests", "files"):
                parts[name].append(block.pictures[name])
            parts["starts"].append(block.pictures["starts"] + tokens)
            parts["ends"].append(block.pictures["ends"][1:] + size)
            size += len(block.pictures["files"])
        tokens += len(block.tokens)
    return {name: np.concatenate(values) for name, values in parts.items()}


def _text_of(file: PictureFile) -> bytes:
    """A picture's path after a "p", or the bytes of its file after a "b"."""
    return b"b" + file.content if file.content else b"p" + file.path.encode()


def _file_of(text: bytes) -> PictureFile:
    return PictureFile(content=text[1:]) if text[:1] == b"b" else PictureFile(text[1:].decode())


def _weight(sample: Sample, targets: np.ndarray) -> float:
    """The sum of the weights of a sample's supervised tokens."""
    return float(len(targets) if sample.weights is None else sample.weights[targets].sum(dtype=np.float64))


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays])


def _columns_of(samples: Sequence[Sample]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The columns of samples with a value each, and those with a value per token."""
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    columns, token_columns = {}, {}
    for name in names:
        values = [np.asarray(sample.columns[name]) for sample in samples if name in sample.columns]
        if len(values) < len(samples):
            raise TuneError(
                f"column {name} has {len(values):,} values for {len(samples):,} samples; it must have one value for "
                "each sample or for each token"
            )
        if values[0].ndim:
            token_columns[name] = np.concatenate(values)
        else:
            columns[name] = np.stack(values)
    return columns, token_columns


def _joined_columns(columns: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for of_block in columns for name in of_block)
    joined = {}
    for name in names:
        values = [of_block[name] for of_block in columns if name in of_block]
        if len(values) < len(columns):
            raise TuneError(f"column {name} is not in all rows; it must have one value for each sample or each token")
        joined[name] = np.concatenate(values)
    return joined
