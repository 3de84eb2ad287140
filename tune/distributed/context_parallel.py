"""Context parallelism: the processes of the mesh's axis `cp` share the tokens of each batch.

Each computes hidden states of a part of the tokens, from the embedding to the head. In each layer's attention the keys
and values of all parts are gathered, so that documents, windows, soft caps and sinks are those of one process. Outside
of the model nothing is split: all processes of `cp` give it the same batch, and get the same result for it.

Gradients of the weights are those of the own tokens: FSDP, which shards over `dp_shard` x `cp`, adds them up.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tune.collators import IGNORE, Batch, Documents
from tune.distributed.exchanges import Peers
from tune.distributed.wrapping import Forward, Wrap, wrap, wrapper_of
from tune.errors import TuneError


@dataclass(slots=True, eq=False)
class Pieces:
    """The part of a batch that a process has, see `tune.collators.Part`, and where its tokens are."""

    whole: Documents
    boundaries: Tensor
    lengths: tuple[int, ...]
    longest: int
    places: Tensor  # int64 [tokens]: its tokens, of the flattened and padded batch
    supervised: Tensor  # int64 [supervised tokens of the part]: which of those of the batch they are
    index: Tensor  # int64 [sum of lengths]: what its pieces attend to, of the tokens of all processes
    peers: Peers

    def attended(self, *tensors: Tensor) -> list[Tensor]:
        together = self.peers.gathered(torch.cat(tensors, dim=-1)[0]).index_select(0, self.index)[None]
        return [*together.split([tensor.shape[-1] for tensor in tensors], dim=-1)]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the parts, in each of which the same is computed of it."""
        return self.peers.summed(tensor)

    def sums(self, values: Tensor, ids: Tensor) -> Tensor:
        zeros = values.new_zeros(len(self.whole.boundaries) - 1, *values.shape[1:])
        return self.sum(zeros.index_add(0, ids.flatten(), values))

    def of_all(self, values: Tensor, places: Tensor, count: int) -> Tensor:
        """`values` of the part at their `places`, and those of the other parts at theirs: `[count, ...]`."""
        return self.sum(values.new_zeros(count, *values.shape[1:]).index_copy(0, places, values))


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have the forwards of `model` compute the process's part of each batch, and give the result for the whole.

    What a head with the attribute `of_parts` gives is for "sum" added up, and for "tokens" put together: values per
    supervised token. Any other head is called on each process with hidden states of all tokens.

    A frozen model that cannot is computed by each process as a whole.

    Raises:
        TuneError: a layer of the model, which is trained, needs all tokens in one process.
    """
    names = [name for name, module in model.named_modules() if getattr(module, "is_recurrent", False)]
    can_split = hasattr(model, "attends_to_parts")
    if (names or not can_split) and not any(parameter.requires_grad for parameter in model.parameters()):
        return
    if not can_split:
        raise TuneError(
            f"parallel.cp: {type(model).__name__} computes all tokens of a document in one process; models of "
            "tune.models.build can share them. Set parallel.cp=1"
        )
    if names:
        raise TuneError(
            f"parallel.cp: {type(model.get_submodule(names[0])).__name__} ({names[0]}) computes one token after the "
            "other, and processes cannot share the tokens of a document. Set parallel.cp=1"
        )
    wrap(model, Wrap.TOKENS, Split(model, mesh))


@dataclass(eq=False)
class Split:
    """Gives the forward of `model` the process's part of each batch, and a head that gives the result for the whole."""

    model: Any
    mesh: DeviceMesh
    part: Callable[[Batch], Batch] = field(init=False)  # of a batch; the last one is kept, for several forwards in turn

    def __post_init__(self) -> None:
        self.part = functools.lru_cache(maxsize=1)(functools.partial(part_of, mesh=self.mesh))

    def __call__(self, forward: Forward) -> Forward:
        def split_forward(batch: Batch | Tensor, head: Any = None, **others: Any) -> Any:
            if others.get("cache") is not None:  # each process generates alone
                return forward(batch, head, **others)
            if not isinstance(batch, Batch):
                raise TuneError("parallel.cp: the model needs a Batch: Batch.of(tokens)")
            mine = self.part(batch)
            of_whole = _of_whole(head or self.model.logits, batch, mine.documents.part, self.mesh.size())
            return forward(mine, of_whole, **others)

        return split_forward


def own_part(model: nn.Module, batch: Batch) -> Batch:
    """The part of `batch` that this process computes with `model`: all of it without context parallelism."""
    split_by = wrapper_of(model, Wrap.TOKENS)
    return batch if split_by is None else split_by.part(batch)


def _of_whole(head: Any, batch: Batch, part: Any, size: int) -> Callable[..., Any]:
    """A head for a part of `batch` that gives what `head` gives for all of it."""
    of_parts = getattr(head, "of_parts", None)

    def of_whole(hidden: Tensor, weight: Tensor, mine: Batch, **options: Any) -> Any:
        if of_parts == "sum":
            return part.sum(head(hidden, weight, mine, **options))
        if of_parts == "tokens":
            own = head(hidden, weight, mine, **options)
            count = batch.num_supervised
            of_all = (part.of_all(values.float(), part.supervised, count).to(values.dtype) for values in own)
            return type(own)(*of_all)
        hidden = part.of_all(hidden[0], part.places, part.whole.ids.numel())[: batch.tokens.numel()]
        weight = weight.view_as(weight)
        if weight.requires_grad:  # each process computes the gradient as a whole
            weight.register_hook(lambda gradient: gradient * (1 / size))
        return head(hidden.view(*batch.tokens.shape, -1), weight, batch, **options)

    of_whole.takes_shares = getattr(head, "takes_shares", False)  # type: ignore[attr-defined]
    return of_whole


def _padded(documents: Documents, total: int, padding: int) -> Documents:
    """`documents` of `total` tokens, and one more of `padding` tokens, of which nothing is learned."""
    return replace(
        documents,
        ids=F.pad(documents.ids.view(1, -1), (0, padding), value=len(documents.lengths)),
        boundaries=F.pad(documents.boundaries, (0, 1), value=total + padding),
        samples=F.pad(documents.samples, (0, 1)),
        num_supervised=F.pad(documents.num_supervised, (0, 1)),
        lengths=(*documents.lengths, padding),
    )


def _places(work: np.ndarray, size: int) -> np.ndarray:
    """Which tokens each of `size` processes has `[size, tokens]`, where a token attends to `work` others: of twice as
    many chunks the two with the most and the least, and so on."""
    chunks = work.reshape(2 * size, -1)
    order = np.argsort(chunks.sum(axis=1), kind="stable")
    pairs = np.sort(np.stack([order[:size], order[: size - 1 : -1]], axis=1), axis=1)
    return (pairs[:, :, None] * chunks.shape[1] + np.arange(chunks.shape[1])).reshape(size, -1)


def part_of(batch: Batch, mesh: DeviceMesh) -> Batch:
    """This process's part of `batch`, one row. It is cut into twice as many chunks as there are processes; each has two
    of them, the one with the most attention and the one with the least, and so on: a document's first and last."""
    device, total = batch.tokens.device, batch.tokens.numel()
    padding = -total % (2 * mesh.size())
    documents = _padded(batch.documents, total, padding) if padding else batch.documents
    lengths = np.array(documents.lengths)
    starts = np.cumsum(lengths) - lengths
    document = np.repeat(np.arange(len(lengths)), lengths)
    of_all = _places(np.arange(total + padding) - starts[document], mesh.size())
    places = of_all[mesh.get_local_rank()]

    # Its pieces end where the document or the chunk does.
    ends = np.append(np.flatnonzero((np.diff(places) != 1) | (np.diff(document[places]) != 0)), len(places) - 1)
    lasts = places[ends]
    firsts = starts[document[lasts]]
    attended = np.concatenate([np.arange(first, last + 1) for first, last in zip(firsts, lasts, strict=True)])
    where, local = np.empty(total + padding, dtype=np.int64), np.full(total + padding, -1)
    where[of_all.ravel()] = np.arange(total + padding)
    local[places] = np.arange(len(places))
    supervised = local[batch.supervised_on_host]
    of_part = np.flatnonzero(supervised >= 0)

    def on_device(values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    def of_lengths(lengths: np.ndarray) -> dict[str, Any]:
        return {
            "boundaries": on_device(np.append(0, np.cumsum(lengths)).astype(np.int32)),
            "lengths": tuple(lengths.tolist()),
            "longest": 1 << (int(lengths.max()) - 1).bit_length(),
        }

    index = on_device(places)

    def mine(values: Tensor, fill: int = 0) -> Tensor:
        flat = values.flatten(0, 1)
        return F.pad(flat, (*(0, 0) * (flat.ndim - 1), 0, padding), value=fill).index_select(0, index)[None]

    pieces = Pieces(
        documents,
        **of_lengths(lasts - firsts + 1),
        places=index,
        supervised=on_device(of_part),
        index=on_device(where[attended]),
        peers=Peers.of(mesh),
    )
    per_token = batch.tokens.shape
    return replace(
        batch,
        tokens=mine(batch.tokens),
        labels=mine(batch.labels, IGNORE),
        positions=mine(batch.positions),
        documents=replace(
            documents,
            ids=documents.ids.view(1, -1).index_select(1, index),
            **of_lengths(np.diff(ends, prepend=-1)),
            part=pieces,
        ),
        supervised=on_device(supervised[of_part]),
        supervised_on_host=supervised[of_part],
        columns={
            name: mine(column) if column.shape[:2] == per_token else column for name, column in batch.columns.items()
        },
        num_supervised=len(of_part),
        shared=None,
        weights=None if batch.weights is None else mine(batch.weights),
    )
