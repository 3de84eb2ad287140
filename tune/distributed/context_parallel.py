"""Context parallelism: the processes of the mesh's axis `cp` share the tokens of each batch.

Each process computes hidden states for a part of the tokens, from the embedding to the head. The attention of each
layer gathers the keys and values of all parts, so documents, windows, soft caps and sinks work as on one process.
Outside the model nothing is split: all processes of `cp` pass it the same batch and get the same result.

Each process computes the weight gradients of its own tokens; FSDP, which shards over `dp_shard` x `cp`, sums them. A
head that is computed on all tokens by each process contributes 1 / size of its gradients (`WholeHead`).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tune.collators import IGNORE, Batch, Documents
from tune.distributed.exchanges import Peers
from tune.distributed.wrapping import Forward, Wrap, wrap, wrapper_of
from tune.errors import TuneError


@dataclass(slots=True, eq=False)
class Pieces:
    """A process's part of a batch (see `tune.collators.Part`) and the places of its tokens."""

    whole: Documents
    boundaries: Tensor
    lengths: tuple[int, ...]
    longest: int
    places: Tensor  # int64 [tokens]: indices of its tokens in the flattened and padded batch
    supervised: Tensor  # int64 [supervised tokens of the part]: their indices among the batch's supervised tokens
    index: Tensor  # int64 [sum of lengths]: the tokens that its pieces attend to, as indices into the gathered tokens
    peers: Peers

    def attended(self, *tensors: Tensor) -> list[Tensor]:
        together = self.peers.gathered(torch.cat(tensors, dim=-1)[0]).index_select(0, self.index)[None]
        return [*together.split([tensor.shape[-1] for tensor in tensors], dim=-1)]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the parts; every process then computes the same from the sum."""
        return self.peers.summed(tensor)

    def sums(self, values: Tensor, ids: Tensor) -> Tensor:
        zeros = values.new_zeros(len(self.whole.boundaries) - 1, *values.shape[1:])
        return self.sum(zeros.index_add(0, ids.flatten(), values))

    def of_all(self, values: Tensor, places: Tensor, count: int) -> Tensor:
        """Combine the `values` of all parts at their `places`: `[count, ...]`."""
        return self.sum(values.new_zeros(count, *values.shape[1:]).index_copy(0, places, values))


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have the forwards of `model` compute the process's part of each batch and return the result for the whole batch.

    A head's attribute `of_parts` says how to combine its results: "sum" adds them, "tokens" joins values per supervised
    token. Any other head is called on each process with the hidden states of all tokens. Parameters of the model that
    it reads, such as those of a second head, get the gradient of one process.

    A frozen model that cannot be split is computed as a whole by each process.

    Raises:
        TuneError: the model is trained and one of its layers needs all tokens in one process.
    """
    names = [name for name, module in model.named_modules() if getattr(module, "is_recurrent", False)]
    can_split = hasattr(model, "attends_to_parts")
    if (names or not can_split) and not any(parameter.requires_grad for parameter in model.parameters()):
        return
    if not can_split:
        raise TuneError(
            f"parallel.cp: {type(model).__name__} cannot split the tokens of a document; models of tune.models.build "
            "can. Set parallel.cp=1"
        )
    if names:
        raise TuneError(
            f"parallel.cp: {type(model.get_submodule(names[0])).__name__} ({names[0]}) is recurrent, so the tokens of "
            "a document cannot be split. Set parallel.cp=1"
        )
    wrap(model, Wrap.TOKENS, Split(model, mesh))


@dataclass(eq=False)
class Split:
    """Pass the process's part of each batch to the forward of `model`, with a head that returns the whole result."""

    model: Any
    mesh: DeviceMesh
    part: Callable[[Batch], Batch] = field(init=False)  # caches the last batch, for several forwards in a row

    def __post_init__(self) -> None:
        self.part = functools.lru_cache(maxsize=1)(functools.partial(part_of, mesh=self.mesh))

    def __call__(self, forward: Forward) -> Forward:
        def split_forward(batch: Batch | Tensor, head: Any = None, **others: Any) -> Any:
            if others.get("cache") is not None:  # generation: each process computes alone
                return forward(batch, head, **others)
            if not isinstance(batch, Batch):
                raise TuneError(f"parallel.cp: the model needs a Batch, got {type(batch).__name__}: Batch.of(tokens)")
            mine = self.part(batch)
            whole = WholeHead(self.model, self.mesh.size())
            of_whole = _of_whole(head or self.model.logits, batch, mine.documents.part, whole)
            return forward(mine, of_whole, **others)

        return split_forward


def own_part(model: nn.Module, batch: Batch) -> Batch:
    """Return the part of `batch` that this process computes; without context parallelism, all of it."""
    split_by = wrapper_of(model, Wrap.TOKENS)
    return batch if split_by is None else split_by.part(batch)


@dataclass(eq=False)
class WholeHead:
    """A context for a head that each of `size` processes computes on all tokens: each then has the whole gradient of
    what the head reads, and FSDP sums them. In this context the parameters of `model` are seen through views whose
    gradients are divided by `size`. Parameters outside the model are not FSDP's, and keep their gradients.

    Only parameters of the root unit are gathered here. Raises TuneError if the head calls another trained unit, such as
    a block.
    """

    model: nn.Module
    size: int

    def __enter__(self) -> None:
        self.parameters = {(module, kind): parameter for module, kind, parameter in _trained_in_root(self.model)}
        for (module, kind), parameter in self.parameters.items():
            module._parameters[kind] = self.divided(parameter)  # type: ignore[assignment]
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self.hooks = [unit.register_forward_pre_hook(self._refuse) for unit in units if unit is not self.model]

    def __exit__(self, *_: object) -> None:
        for (module, kind), parameter in self.parameters.items():
            module._parameters[kind] = parameter
        for hook in self.hooks:
            hook.remove()

    def divided(self, parameter: Tensor) -> Tensor:
        """Return a view of `parameter` whose gradient is divided by the number of processes."""
        view = parameter.view_as(parameter)
        if view.requires_grad:
            view.register_hook(lambda gradient: gradient * (1 / self.size))
        return view

    def _refuse(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in module.parameters()):
            return
        names = {id(each): name for name, each in self.model.named_modules()}
        raise TuneError(
            f"parallel.cp: a head calls {type(module).__name__} ({names[id(module)]}) of the model, whose gradients "
            "would count once per process. Add a module of its own to the model, or set parallel.cp=1"
        )


def _trained_in_root(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the trained parameters below `module` that no other FSDP unit has: module, name and parameter."""
    for kind, parameter in module._parameters.items():
        if parameter is not None and parameter.requires_grad:
            yield module, kind, parameter
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _trained_in_root(child)


def _of_whole(head: Any, batch: Batch, part: Any, whole: WholeHead) -> Callable[..., Any]:
    """Return a head for a part of `batch` that computes the result of `head` for the whole batch."""
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
        with whole:
            return head(hidden.view(*batch.tokens.shape, -1), whole.divided(weight), batch, **options)

    of_whole.takes_shares = getattr(head, "takes_shares", False)  # type: ignore[attr-defined]
    return of_whole


def _padded(documents: Documents, total: int, padding: int) -> Documents:
    """Append a document of `padding` unsupervised tokens to `documents` of `total` tokens."""
    return replace(
        documents,
        ids=F.pad(documents.ids.view(1, -1), (0, padding), value=len(documents.lengths)),
        boundaries=F.pad(documents.boundaries, (0, 1), value=total + padding),
        samples=F.pad(documents.samples, (0, 1)),
        num_supervised=F.pad(documents.num_supervised, (0, 1)),
        lengths=(*documents.lengths, padding),
    )


def _places(work: np.ndarray, size: int) -> np.ndarray:
    """Assign tokens to processes: `[size, tokens]`. `work` is the number of tokens that each token attends to. Tokens
    are cut into 2 x `size` chunks; each process gets one with much and one with little work."""
    chunks = work.reshape(2 * size, -1)
    order = np.argsort(chunks.sum(axis=1), kind="stable")
    pairs = np.sort(np.stack([order[:size], order[: size - 1 : -1]], axis=1), axis=1)
    return (pairs[:, :, None] * chunks.shape[1] + np.arange(chunks.shape[1])).reshape(size, -1)


def part_of(batch: Batch, mesh: DeviceMesh) -> Batch:
    """Return this process's part of `batch`, as one row. The batch is cut into twice as many chunks as processes. Each
    process gets two: one with much attention work and one with little, e.g. the last and first of a document."""
    device, total = batch.tokens.device, batch.tokens.numel()
    padding = -total % (2 * mesh.size())
    documents = _padded(batch.documents, total, padding) if padding else batch.documents
    lengths = np.array(documents.lengths)
    starts = np.cumsum(lengths) - lengths
    document = np.repeat(np.arange(len(lengths)), lengths)
    of_all = _places(np.arange(total + padding) - starts[document], mesh.size())
    places = of_all[mesh.get_local_rank()]

    # A piece ends where its document or chunk ends.
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
