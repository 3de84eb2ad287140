"""Collate rows of samples into a batch of tensors, with everything that the host can compute."""

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tune.errors import TuneError

IGNORE = -100
"""The label of a position that is not supervised."""

WORTH_SHARING = 1 / 8  # share of a batch's or document's tokens; below it, gathering keys costs what sharing saves

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a sample: its file, a digest of the file, and its tokens [start, start + length)."""

    file: Any
    digest: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A document's token ids and the id to predict at each position (`tokens[i + 1]`, or -100), int32 `[length]`.

    `columns` are further values by name: an array `[length, ...]` per token, or a number for the document. All samples
    of a dataset have the same columns.
    """

    tokens: np.ndarray
    labels: np.ndarray
    index: int = 0  # in its dataset
    columns: Mapping[str, Any] = field(default_factory=dict)
    weights: np.ndarray | None = None  # fp32 [length]: how much the loss at each position counts; None: 1
    place: str = ""  # of its row in the source, as in messages: "chats.jsonl:12"
    pictures: tuple[Picture, ...] = ()

    @property
    def weights_or_ones(self) -> np.ndarray:
        """The weights as an array, fp32 `[length]`."""
        return np.ones(len(self.tokens), dtype=np.float32) if self.weights is None else self.weights


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of a batch, numbered from 0 over all rows. Padding at the end of a row is a document of its own.

    `boundaries` are the documents' starts in the flattened batch, then its length (`cu_seqlens`). `longest` is the
    greatest length, rounded up to a power of two: kernels are compiled for it, so it should take few values.
    """

    ids: Tensor  # int64 [rows, seq]: the document of each token
    boundaries: Tensor  # int32 [documents + 1]
    samples: Tensor  # int64 [documents]: index of the sample in its dataset
    num_supervised: Tensor  # int64 [documents]: supervised tokens
    lengths: tuple[int, ...]
    longest: int
    part: "Part | None" = None  # set if these are pieces of documents in a part of a batch

    @property
    def whole(self) -> "Documents":
        """The documents of the whole batch."""
        return self if self.part is None else self.part.whole

    def sums(self, values: Tensor) -> Tensor:
        """The sums over each document of the batch, `[documents, ...]`, of `values` `[tokens, ...]`."""
        if self.part is not None:
            return self.part.sums(values, self.ids)
        return values.new_zeros(len(self.boundaries) - 1, *values.shape[1:]).index_add(0, self.ids.flatten(), values)


class Part(Protocol):
    """Access from a part of a batch to the rest, which is on other processes or repeats tokens of the part.

    In the part's `Documents`, `ids`, `samples` and `num_supervised` refer to whole documents. The other fields refer to
    pieces: runs of tokens of one document.

    Each piece attends to its document up to the piece's last token. `boundaries`, `lengths` and `longest` here describe
    the tokens that the pieces attend to, piece by piece.
    """

    whole: Documents
    boundaries: Tensor
    lengths: tuple[int, ...]
    longest: int

    def attended(self, *tensors: Tensor) -> list[Tensor]:
        """The values that pieces attend to, `[1, sum of lengths, heads, size]`, from `[1, seq, heads, size]`."""

    def sums(self, values: Tensor, ids: Tensor) -> Tensor:
        """The sums of `Documents.sums` over the whole batch, from the part's `values` of documents `ids`."""


@dataclass(slots=True, eq=False)
class Repeats:
    """A `Part` without repeated prefixes of documents: each piece is the end of a document."""

    whole: Documents
    boundaries: Tensor
    lengths: tuple[int, ...]
    longest: int
    index: Tensor  # int64 [tokens of the batch]: the token of the part for each token of the batch

    def attended(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.index_select(1, self.index) for tensor in tensors]

    def sums(self, values: Tensor, ids: Tensor) -> Tensor:
        return self.whole.sums(values.index_select(0, self.index))


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The tokens of a batch and their positions, `[1, seq]`, with shared prefixes of documents only once."""

    tokens: Tensor
    positions: Tensor
    documents: Documents  # with `part`

    def of_batch(self, values: Tensor) -> Tensor:
        """Expand `values` `[1, seq, ...]` to all tokens of the batch."""
        assert self.documents.part is not None
        return self.documents.part.attended(values)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """The pictures of a batch, as the arguments of a transformers model (`pixel_values`, `image_grid_thw` ...).

    Values of all pictures, in the order of their placeholders in the tokens, are joined along the first dimension.
    `count` 0 means a batch without pictures in a run that has some: `values` are then those of a blank picture, which
    is noise and has no placeholders. All processes must call the tower, or those that do would wait for the others.
    """

    values: dict[str, Tensor]
    count: int


class Pixels(Protocol):
    """Makes the arguments of a model for pictures: `tune.tokenizers.PictureProcessor`."""

    @property
    def blank(self) -> dict[str, np.ndarray]: ...

    def values(self, picture: Any, digest: int) -> dict[str, np.ndarray]: ...


class Columns(dict[str, Tensor]):
    """Columns of a batch by name."""

    def __missing__(self, name: str) -> Tensor:
        known = ", ".join(self) or "none"
        raise TuneError(
            f"batch.columns: there is no column {name!r}; there are: {known}. If the rows of the data have it, set "
            f"dataset.extra_columns=[{name}]"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The input of a forward and a loss, computed on the host so that neither synchronizes with the device."""

    tokens: Tensor  # int64 [rows, seq]
    labels: Tensor  # int64 [rows, seq], -100 where nothing is supervised
    positions: Tensor  # int64 [rows, seq]: restart at 0 in each document
    documents: Documents
    supervised: Tensor  # int64 [num_supervised]: ascending indices into the flattened batch
    supervised_on_host: np.ndarray  # the same indices
    columns: dict[str, Tensor]  # `[rows, seq, ...]` or `[documents]`; 0 for padding
    pairs: Tensor  # int64 [2, pairs]: documents to compare: the first answer of each group with each of the others
    num_tokens: int  # without padding
    num_supervised: int
    shared: Shared | None = None  # the tokens that a causal model needs to compute; None: all
    # The optimizer step that the batch belongs to, see `in_step`.
    step_seed: int | None = None
    supervised_in_step: int | None = None
    weights: Tensor | None = None  # fp32 [rows, seq]: how much the loss of each token counts; None: 1
    places: tuple[str, ...] = ()  # for each document, "chats.jsonl:12" in the source; "" if it has none
    pictures: Pictures | None = None  # None: the run has no pictures

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", Columns(self.columns))

    @classmethod
    def of(
        cls,
        tokens: Any,
        labels: Any = None,
        documents: Any = None,
        samples: Sequence[int] | None = None,
        columns: Mapping[str, Any] | None = None,
        num_tokens: int | None = None,
        weights: Any = None,
        *,
        shifted: bool = True,
    ) -> "Batch":
        """Make a batch from lists, arrays or tensors on the host.

        Args:
            tokens: `[rows, seq]`, integer ids.
            labels: `[rows, seq]`, the id to predict at each position, or -100. By default nothing is supervised.
            documents: `[rows, seq]`; a run of equal numbers in a row is a document. By default each row is one.
            samples: the index of each document's sample in its dataset.
            columns: further values by name, `[rows, seq, ...]` or, in the order of the documents, `[documents]`.
            num_tokens: without padding; by default all.
            weights: `[rows, seq]`, the weight of the loss at each position; by default 1. Losses that are sums over
                supervised tokens apply it; the caller chooses the divisor.
            shifted: True if `labels[i]` is the target of position i, the id of token i + 1. False if it is the id of
                token i, as in Hugging Face's batches; the labels are then shifted here (`shift_labels`).

        Raises:
            TuneError: shapes do not match, ids are not integers, labels are negative but not -100, or weights are
                negative or not finite.
        """
        tokens = _ids("tokens", tokens)
        if tokens.ndim != 2 or not tokens.size:
            raise TuneError(f"tokens: the shape is {[*tokens.shape]}; it must be [rows, seq] with at least one token")
        labels = np.full_like(tokens, IGNORE) if labels is None else _ids("labels", labels)
        documents = None if documents is None else _host("documents", documents)
        weights = None if weights is None else _host("weights", weights).astype(np.float32)
        for name, values in (("labels", labels), ("documents", documents), ("weights", weights)):
            if values is not None and values.shape != tokens.shape:
                raise TuneError(f"{name}: the shape is {[*values.shape]}; it must be {[*tokens.shape]} as for tokens")
        if len(wrong := labels[(labels < 0) & (labels != IGNORE)]):
            raise TuneError(f"labels: {wrong[0]} is not a token id; {IGNORE} marks positions that are not supervised")
        if weights is not None and not ((weights >= 0) & np.isfinite(weights)).all():
            raise TuneError("weights: found a negative or non-finite weight; weights must be 0 or above")
        if not shifted:
            labels = shift_labels(torch.from_numpy(labels), documents).numpy()
        starts = np.ones_like(tokens, dtype=bool)
        starts[:, 1:] = False if documents is None else np.diff(documents, axis=1) != 0
        begins = np.flatnonzero(starts)
        columns = {name: _host(f"columns.{name}", values) for name, values in (columns or {}).items()}
        for name, values in columns.items():
            if values.shape[:2] != tokens.shape and values.shape[:1] != begins.shape:
                raise TuneError(
                    f"columns.{name}: the shape is {[*values.shape]}; it must begin with {[*tokens.shape]}, for a "
                    f"value per token, or be [{len(begins)}], one per document"
                )
        if samples is not None and len(samples) != len(begins):
            raise TuneError(f"samples: found {len(samples)} indices for {len(begins)} documents")
        lengths = np.diff(begins, append=tokens.size)
        positions = np.arange(tokens.size) - begins.repeat(lengths)
        supervised = labels.ravel() != IGNORE
        places = np.flatnonzero(supervised)
        answers = np.asarray(columns.get("answer", []), dtype=np.int64)  # number within the group
        others = np.flatnonzero(answers)
        return cls(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            torch.from_numpy(positions.reshape(tokens.shape)),
            Documents(
                torch.from_numpy((starts.cumsum() - 1).reshape(tokens.shape)),
                torch.from_numpy(np.append(begins, tokens.size).astype(np.int32)),
                torch.from_numpy(np.asarray(samples if samples is not None else range(len(begins)), dtype=np.int64)),
                torch.from_numpy(np.add.reduceat(supervised, begins, dtype=np.int64)),
                tuple(lengths.tolist()),
                1 << (int(lengths.max()) - 1).bit_length(),
            ),
            torch.from_numpy(places),
            places,
            {name: torch.as_tensor(values) for name, values in columns.items()},
            torch.from_numpy(np.stack([others - answers[others], others])),
            num_tokens=tokens.size if num_tokens is None else num_tokens,
            num_supervised=int(supervised.sum()),
            weights=None if weights is None else torch.from_numpy(weights),
            places=("",) * len(begins),
        )

    def in_step(self, seed: int, step: int, num_supervised: int) -> "Batch":
        """The batch as a part of optimizer step `step`, which has `num_supervised` supervised tokens over all ranks.

        Adapter dropout then is a function of (`seed`, step, sample, position), and the experts' load-balancing loss is
        divided by `num_supervised`. Without this call, torch's generator draws the dropout, and the divisor is the
        batch's own number of supervised tokens.
        """
        step_seed = zlib.crc32(f"{seed} {step}".encode())
        return replace(self, step_seed=step_seed, supervised_in_step=num_supervised)

    def reweighed(self, scale: float) -> "Batch":
        """A copy with all weights multiplied by `scale`."""
        if scale == 1:
            return self
        weights = torch.ones(self.tokens.shape) if self.weights is None else self.weights
        return replace(self, weights=(weights.double() * scale).float())  # both factors may exceed fp32's range

    def to(self, device: torch.device | str) -> "Batch":
        return _each_tensor(self, lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> "Batch":
        return _each_tensor(self, Tensor.pin_memory)


def shift_labels(labels: Tensor, documents: Any = None) -> Tensor:
    """Shift Hugging Face labels for the losses here: `labels[..., i]` becomes the id of token i + 1 instead of i.

    The last token of a row gets -100, and so does the last token of each document, if `documents` `[rows, seq]` gives
    the document number of each token.

    `labels` `[..., seq]` -> a new tensor of the same shape.
    """
    shifted = torch.full_like(labels, IGNORE)
    shifted[..., :-1] = labels[..., 1:]
    if documents is not None:
        documents = torch.as_tensor(documents, device=labels.device)
        shifted[..., :-1].masked_fill_(documents[..., 1:] != documents[..., :-1], IGNORE)
    return shifted


def collate(
    rows: Sequence[Sample | Sequence[Sample]],
    pad_to: int | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
    pictures: Pixels | None = None,
) -> Batch:
    """Make a batch `[len(rows), pad_to]`, or with `pad_to=None` join all rows into one, `[1, total]`, without padding.

    A row is a document or a list of documents. It may be empty, to fill up a batch. `columns` has an example value of
    each column, for batches without any document; the default are the columns of the first document. Joined rows
    compute shared prefixes of documents once; padded rows do not, since compiled blocks need a fixed shape.

    `pictures` makes pixels of the documents' pictures, or of a blank one for a batch without any. None: the data have
    no pictures.

    Can be the `collate_fn` of torch.utils.data.DataLoader.
    """
    joined = pad_to is None
    lists = [[row] if isinstance(row, Sample) else [*row] for row in rows]
    present = [document for row in lists for document in row]
    if pad_to is None:
        lists, pad_to = [present], max(1, sum(len(document.tokens) for document in present))
    if columns is None:
        columns = {name: np.asarray(value) for name, value in (present[0].columns if present else {}).items()}
    documents: list[Sample] = []
    for row in lists:
        padding = pad_to - sum(len(document.tokens) for document in row)
        zeros = {
            name: np.zeros((padding, *each.shape[1:]) if each.ndim else (), each.dtype)
            for name, each in columns.items()
        }
        documents += row
        if padding:
            documents.append(Sample(np.zeros(padding, np.int32), np.full(padding, IGNORE, np.int32), columns=zeros))
    tokens = np.concatenate([document.tokens for document in documents]).reshape(len(lists), pad_to)
    labels = np.concatenate([document.labels for document in documents]).reshape(len(lists), pad_to)
    ids = np.arange(len(documents)).repeat([len(each.tokens) for each in documents]).reshape(len(lists), pad_to)
    values = {}
    for name, example in columns.items():
        found = [np.asarray(document.columns[name]) for document in documents]
        is_integer = all(value.dtype.kind in "iub" for value in (example, *found))
        of_documents = [value.astype(np.int64 if is_integer else np.float32) for value in found]
        together = np.concatenate(of_documents) if example.ndim else np.stack(of_documents)
        values[name] = together.reshape(*ids.shape, *example.shape[1:]) if example.ndim else together
    samples = [document.index for document in documents]
    weights = None
    if any(document.weights is not None for document in documents):
        weights = np.concatenate([document.weights_or_ones for document in documents]).reshape(ids.shape)
    count = sum(len(document.tokens) for document in present)
    batch = Batch.of(tokens, labels, ids, samples, values, count, weights)
    places = tuple(document.place for document in documents)
    if pictures is None and (shown := next((each for each in present if each.pictures), None)):
        raise TuneError(
            f"collate: the document {shown.place} has pictures, whose pixels nothing makes here. Pass "
            "pictures=dataset.pictures, or use rows without pictures"
        )
    if pictures is not None:  # equal tokens may stand for different pictures, so no prefix is shared
        return replace(batch, places=places, pictures=_pictures_of(present, pictures))
    return replace(batch, places=places, shared=_shared(batch) if joined else None)


def _pictures_of(documents: Sequence[Sample], pixels: Pixels) -> Pictures:
    """The pictures of documents, joined along the first dimension, and padded with zeros along others."""
    shown = [picture for document in documents for picture in document.pictures]
    arrays = [pixels.values(picture.file, picture.digest) for picture in shown] or [pixels.blank]
    values = {}
    for name in arrays[0]:
        found = [each[name] for each in arrays]
        largest = [max(sizes) for sizes in zip(*(each.shape[1:] for each in found), strict=True)]
        padded = [np.pad(each, [(0, 0), *_missing(each.shape[1:], largest)]) for each in found]
        values[name] = torch.from_numpy(np.concatenate(padded))
    return Pictures(values, len(shown))


def _missing(sizes: Sequence[int], largest: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, most - size) for size, most in zip(sizes, largest, strict=True)]


def _shared(batch: Batch) -> Shared | None:
    """The batch without prefixes that repeat another document's; a prefix ends before the first supervised token."""
    documents, tokens, supervised = batch.documents, batch.tokens[0].numpy(), batch.supervised_on_host
    bounds = documents.boundaries.numpy()
    index, kept = np.arange(tokens.size), np.ones(tokens.size, dtype=bool)
    known, before = np.arange(0), tokens[:0]  # index and tokens of the previous document, in the order of tokens
    for start, end in sorted(itertools.pairwise(bounds.tolist()), key=lambda each: tokens[slice(*each)].tolist()):
        first = supervised[np.searchsorted(supervised, start) :][:1].tolist()
        most = min(len(before), min([end - 1, *first]) - start)
        alike = tokens[start : start + most] == before[:most]
        length = most if alike.all() else int(alike.argmin())
        if length >= WORTH_SHARING * (end - start):
            index[start : start + length] = known[:length]
            kept[start : start + length] = False
        known, before = index[start:end], tokens[start:end]
    if kept.mean() > 1 - WORTH_SHARING:
        return None
    places = torch.from_numpy(np.flatnonzero(kept))
    lengths = np.add.reduceat(kept, bounds[:-1], dtype=np.int64)
    all_of = documents.boundaries, documents.lengths, documents.longest
    part = replace(
        documents,
        ids=documents.ids[:, places],
        boundaries=torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32)),
        lengths=tuple(lengths.tolist()),
        longest=1 << (int(lengths.max()) - 1).bit_length(),
        part=Repeats(documents, *all_of, torch.from_numpy((kept.cumsum() - 1)[index])),
    )
    return Shared(batch.tokens[:, places], batch.positions[:, places], part)


def _host(name: str, values: Any) -> np.ndarray:
    """`values` as an array."""
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise TuneError(f"{name}: found a tensor on {values.device}. Make the Batch on the host, then batch.to(device)")
    try:
        return np.asarray(values.detach() if isinstance(values, Tensor) else values)
    except (ValueError, TypeError) as error:
        raise TuneError(f"{name}: not an array ({error}). Pad rows to one length, or use collate") from error


def _ids(name: str, values: Any) -> np.ndarray:
    """`values` as int64."""
    array = _host(name, values)
    if array.dtype.kind not in "iu":
        raise TuneError(f"{name}: found {array.dtype}; ids must be integers")
    return array.astype(np.int64, copy=False)


def _each_tensor(value: T, function: Callable[[Tensor], Tensor]) -> T:
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {name: _each_tensor(each, function) for name, each in value.items()}  # type: ignore[return-value]
    if not isinstance(value, Batch | Documents | Shared | Repeats | Pictures):
        return value
    changed: Any = {each.name: _each_tensor(getattr(value, each.name), function) for each in fields(value)}
    return replace(value, **changed)
