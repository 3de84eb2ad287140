"""Shared parts of heads that work in chunks of tokens: logits, normalization over the vocabulary, gradients."""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tune.errors import TuneError
from tune.losses.supervised import Labels, label_ids, require_tokens, supervised_places

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SMALL_CHUNK = 512  # tokens
LOGITS = 2**27  # half a GiB in fp32
TILE = 128  # rows that GPU matrix products compute at a time
LOWEST = -1e30  # a logit with probability 0, for which p log p is also 0

HeadFunction = TypeVar("HeadFunction", bound=Callable[..., Any])


def takes_shares(head: HeadFunction) -> HeadFunction:
    """Mark `head` as accepting a DTensor of the output weight, if processes share its rows (`parallel.tp`)."""
    head.takes_shares = True  # type: ignore[attr-defined]
    return head


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor. Does not import the module, which takes a second: if nothing has imported it,
    there are no DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def default_chunk_tokens(vocab: int, device: str) -> int:
    """Return the number of tokens per chunk for a device type."""
    return SMALL_CHUNK if device == "cpu" else max(SMALL_CHUNK, LOGITS // vocab // TILE * TILE)


class VocabularyShard:
    """This process's rows of a head's weight: `count` rows starting at `first`, out of `size`.

    With tensor parallelism the weight is a DTensor whose rows are shared by the processes of a mesh. A plain tensor has
    all rows. Logits are shared in the same way along their last dimension (`dim`).
    """

    def __init__(self, weight: Tensor, size: int | None = None, dim: int = 0):
        if is_dtensor(weight) and isinstance(weight, torch.nn.Parameter):
            raise TuneError(
                "weight: a sharded parameter would be mistaken for rows of the vocabulary that tensor-parallel ranks "
                "share. Compute the loss inside the forward of the FSDP module that owns the weight, where it is "
                "gathered, or pass weight.full_tensor()"
            )
        mesh = weight.device_mesh if is_dtensor(weight) else None
        self.group = None if mesh is None else mesh.get_group()
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        own = weight.to_local() if is_dtensor(weight) else weight
        self.first = self.rank * own.shape[dim]  # all processes have the same number of rows
        left = (weight.shape[dim] if size is None else size) - self.first
        self.has_none = left <= 0  # only padding: one row is still computed, and masked
        self.count = max(1, min(own.shape[dim], left))

    def of(self, logits: Tensor) -> Tensor:
        """Return `logits` of this process's rows, masked in place if they are all padding."""
        return logits.fill_(LOWEST) if self.has_none else logits

    def of_other(self, weight: Tensor, is_alike: bool) -> Tensor:
        """Return the same rows of another head's `weight`. `is_alike`: processes share it in the same way."""
        if is_alike:
            return (weight.to_local() if is_dtensor(weight) else weight)[: self.count]
        if is_dtensor(weight):
            from tune.distributed import full_tensor  # imported late: losses must not need process groups

            weight = full_tensor(weight)
        return weight[min(self.first, len(weight) - 1) :][: self.count]

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `values` over all processes, in place."""
        if self.group is not None:
            dist.all_reduce(values, operation, self.group)
        return values

    def find(self, targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local indices of `targets` `[chunk, k]` in `logits` `[chunk, rows]`, and 1 if they are local, else
        0."""
        places = targets - self.first
        inside = (places >= 0) & (places < logits.shape[1])
        return places.clamp(0, logits.shape[1] - 1), inside.to(logits.dtype)

    def at(self, targets: Tensor, logits: Tensor) -> Tensor:
        """Return the logits of the targets, `[chunk, k]`. A target that is not a row gives NaN, since `check_ids` does
        not check on a GPU; it gives 0 if processes share the rows."""
        places, inside = self.find(targets, logits)
        outside = math.nan if self.group is None else 0.0
        return self.reduce(logits.gather(1, places).where(inside > 0, outside))  # others may be -inf

    def add_at(self, targets: Tensor, logits: Tensor, values: Tensor | float) -> Tensor:
        """Add `values` `[chunk, k]` to `logits` at `targets` `[chunk, k]`, in place, and return `logits`."""
        places, inside = self.find(targets, logits)
        return logits.scatter_add_(1, places, inside * values)

    def without(self, targets: Tensor, p: Tensor) -> Tensor:
        """Set `p` to 0 at the `targets` `[chunk, k]`, which are distinct, in place, and return `p`."""
        places, inside = self.find(targets, p)
        return p.scatter_add_(1, places, -inside * p.gather(1, places))

    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` highest values over all rows and their ids, `[chunk, k]`."""
        highest, ids = values.topk(min(k, values.shape[1]))
        ids += self.first
        if self.group is None:
            return highest, ids
        missing = (0, k - highest.shape[1])
        values, places = self.whole(F.pad(highest, missing, value=LOWEST)), self.whole(F.pad(ids, missing))
        highest, best = values.topk(k)
        return highest, places.gather(1, best)

    def whole(self, values: Tensor) -> Tensor:
        """Gather the values of all processes, `[chunk, all rows]`."""
        if self.group is None:
            return values
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values, self.group)
        return torch.cat(parts, dim=1)

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the first row with the highest logit, `[chunk, 1]`."""
        highest, place = logits.max(dim=1, keepdim=True)
        is_highest = highest == self.reduce(highest.clone(), dist.ReduceOp.MAX)
        none = torch.iinfo(place.dtype).max
        return self.reduce(torch.where(is_highest, place + self.first, none), dist.ReduceOp.MIN)


ALL = VocabularyShard(torch.empty(1))


def operands(hidden: Tensor, weight: Tensor, labels: Labels, vocab: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return `hidden` of the supervised tokens `[tokens, dim]`, this process's rows of `weight` `[rows of vocab, dim]`,
    and the labels, int64 `[tokens]`, as inputs of an autograd function. Two dtypes are promoted to the wider one.

    Raises:
        TuneError: shapes do not match, or a label is not below `vocab`. Labels are only checked on a CPU, where that
            needs no synchronization, and only with a `vocab`.
    """
    ids = label_ids(labels)
    if hidden.ndim != ids.ndim + 1:
        raise TuneError(
            f"labels: shape {[*ids.shape]} does not match hidden {[*hidden.shape]}: hidden must have one more "
            "dimension, the last"
        )
    require_tokens("hidden", hidden, labels)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise TuneError(
            f"weight: shape {[*weight.shape]} does not match hidden {[*hidden.shape]}: weight must be [vocab, dim]"
        )
    places = supervised_places(labels)
    targets = ids.flatten().index_select(0, places)
    if vocab is not None:
        check_ids("labels", targets, vocab)
    if is_dtensor(weight):
        weight = weight.to_local()
    if not torch.is_grad_enabled():  # else ctx.needs_input_grad would still be true for a parameter
        weight = weight.detach()
    return *promoted(hidden.flatten(0, -2).index_select(0, places), weight), targets.long()


def promoted(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Promote both to the wider dtype: bf16 hidden states and an fp32 head become fp32."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return hidden.to(dtype), weight.to(dtype)


def check_ids(name: str, ids: Tensor, vocab: int) -> None:
    """Raise TuneError, naming `name`, for a mask instead of ids; on a CPU also for ids that are not below `vocab`."""
    if ids.dtype == torch.bool:
        raise TuneError(f"{name}: must be ids, got a mask. Label unsupervised tokens with -100")
    is_at_hand = type(ids) is Tensor and ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if not is_at_hand or not ids.numel():
        return
    values = ids.numpy()  # host memory, read without a torch operation
    for wrong in (int(values.min()), int(values.max())):
        if not 0 <= wrong < vocab:
            raise TuneError(
                f"{name}: {wrong} is not an id of a vocabulary of {vocab:,} (the weight's rows or vocab_size). Label "
                "unsupervised tokens with -100"
            )


def chunks_of_logits(
    hidden: Tensor, weight: Tensor, chunk_tokens: int | None, softcap: float | None = None, temperature: float = 1.0
) -> Iterator[tuple[slice, Tensor, Tensor | float]]:
    """Yield, for each chunk of `hidden` `[tokens, dim]`, its slice, its fp32 logits `[chunk, vocab]`, and their
    derivative. `chunk_tokens=None`: see `default_chunk_tokens`.

    Logits are softcap * tanh(x / softcap) / temperature, where x = hidden @ weight.T; the derivative is with respect to
    x. The caller may change the logits: the next chunk overwrites them. (On a CPU, new memory per chunk takes a quarter
    of the product's time.)
    """
    chunk_tokens = chunk_tokens or default_chunk_tokens(len(weight), weight.device.type)
    size = min(chunk_tokens, len(hidden)), len(weight)
    buffer = torch.empty(size, dtype=torch.float32, device=weight.device)
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, min(start + chunk_tokens, len(hidden)))
        logits = buffer[: chunk.stop - start]
        if weight.dtype == logits.dtype:
            torch.mm(hidden[chunk], weight.T, out=logits)
        else:
            logits.copy_(hidden[chunk] @ weight.T)
        slope: Tensor | float = 1 / temperature
        if softcap is not None:
            bounded = logits.div_(softcap).tanh_()
            slope = (1 - bounded.square()) / temperature
            logits = bounded.mul_(softcap)
        yield chunk, logits if temperature == 1 else logits.div_(temperature), slope


def normalize(logits: Tensor, out: Tensor | None = None, rows: VocabularyShard = ALL) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract the maximum from `logits` `[chunk, vocab]` in place. Returns the maximum, the exponentials (in `out`,
    which may be the logits) and their sums. Maximum and sums are over all processes that share the vocabulary's `rows`.
    """
    maximum = rows.reduce(logits.amax(dim=1, keepdim=True), dist.ReduceOp.MAX)
    logits -= maximum
    exponentials = torch.exp(logits, out=out)
    return maximum, exponentials, rows.reduce(exponentials.sum(dim=1, keepdim=True))


def cross_entropy(
    logits: Tensor, targets: Tensor, out: Tensor | None = None, rows: VocabularyShard = ALL
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each token `[chunk, 1]`, and the gradient of `logits` `[chunk, vocab]` (in `out`).
    Changes `logits` like `normalize`."""
    target_logits = rows.at(targets, logits)
    maximum, exponentials, normalizer = normalize(logits, out, rows)
    probabilities = exponentials.div_(normalizer)
    return normalizer.log() - (target_logits - maximum), rows.add_at(targets, probabilities, -1.0)


class Gradients:
    """The gradients of `hidden` `[tokens, dim]` and `weight` `[vocab, dim]`, each None unless requested."""

    def __init__(self, hidden: Tensor, weight: Tensor, of_hidden: bool, of_weight: bool):
        self.operands = hidden, weight
        self.hidden = torch.empty_like(hidden) if of_hidden else None
        # Summed in fp32: bf16 would round away the contributions of later chunks.
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None

    def add(self, chunk: slice, grad_logits: Tensor, slope: Tensor | float) -> None:
        """Add the gradients of a chunk. `grad_logits` is changed in place; `slope` is the derivative of the logits."""
        if self.hidden is None and self.weight is None:
            return
        hidden, weight = self.operands
        if not isinstance(slope, float) or slope != 1:
            grad_logits *= slope
        grad_logits = grad_logits.to(weight.dtype)
        if self.hidden is not None:
            torch.mm(grad_logits, weight, out=self.hidden[chunk])
        if self.weight is not None:
            if grad_logits.dtype == torch.float32:
                self.weight.addmm_(grad_logits.T, hidden[chunk])
            else:
                self.weight += grad_logits.T @ hidden[chunk]


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function whose gradients have no derivatives.

    Raises TuneError with `create_graph=True`. torch's `once_differentiable` would return constants there.
    """

    @functools.wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise TuneError(
                "this loss has no second derivative (create_graph=True). Compute the logits in full for it, "
                "hidden @ weight.T, with the loss of torch.nn.functional"
            )
        return backward(*args)

    return checked


class SumOfChunks(torch.autograd.Function):
    """Sum over chunks of the values of `of_chunk`, which maps a slice of tokens and their logits to a value per token
    `[chunk, 1]` and the gradient of the logits. Both are multiplied by `weights` `[tokens]`, if given. The forward
    computes the gradients of both operands."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, chunk_tokens: int | None, softcap: float | None,
        of_chunk: Callable[[slice, Tensor], tuple[Tensor, Tensor]], weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        gradients = Gradients(hidden, weight, *ctx.needs_input_grad[:2])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk, logits, slope in chunks_of_logits(hidden, weight, chunk_tokens, softcap):
            values, grad_logits = of_chunk(chunk, logits)
            if weights is not None:
                values, grad_logits = values * weights[chunk, None], grad_logits.mul_(weights[chunk, None])
            total += values.sum()
            gradients.add(chunk, grad_logits, slope)
        ctx.save_for_backward(gradients.hidden, gradients.weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            # Not in place, because a graph may have several backwards. The product is rounded without a copy in fp32.
            rounded = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
            grad_weight = torch.mul(grad_weight, grad, out=rounded)
        return grad_hidden, grad_weight, None, None, None, None
