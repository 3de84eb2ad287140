"""Weights with shapes but no values. Results computed with them have only shapes; everything else is computed."""

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tune.validate.guards import value_if_finite
from tune.validate.made_up import Asked

LARGE = 1 << 24  # elements: larger tensors are not allocated
NUMBER = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default
PLAIN = {Tensor, torch.nn.Parameter, FakeTensor}
UNINITIALIZED = {
    *(torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided),
    *(torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided),
}
# Operations whose tensors must have one type, which torch does not check for fake tensors.
OF_ONE_TYPE = {
    *(torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.mv, torch.ops.aten.addmv, torch.ops.aten.dot),
    *(torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.linear),
}
# Operations that write their last tensor into their first, which must have its type.
ASSIGNING = {
    *(torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten.index_add, torch.ops.aten.index_add_),
    *(torch.ops.aten.index_copy, torch.ops.aten.index_copy_),
}
# Operations that write each element of their first argument.
FILLING = {
    *(torch.ops.aten.fill_, torch.ops.aten.zero_, torch.ops.aten.copy_, torch.ops.aten.normal_),
    *(torch.ops.aten.uniform_, torch.ops.aten.random_, torch.ops.aten.bernoulli_),
}


class ReadNumbers(TorchFunctionMode):
    """Notes the lines that read numbers of unknown memory by `tolist`, which no dispatch mode sees."""

    def __init__(self, weights: "FakeWeights"):
        super().__init__()
        self.weights = weights

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.tolist and not isinstance(args[0], FakeTensor) and self.weights.is_fake(args[0]):
            self.weights.asked.note(sys._getframe(1))
            return torch.full(args[0].shape, _number(args[0], None), dtype=args[0].dtype, device="cpu").tolist()
        return function(*args, **(kwargs or {}))


class FakeWeights(TorchDispatchMode):
    """Operations on fake tensors return fake tensors; other operations are computed, so known numbers stay.

    Memory is unknown until it is written as a whole, and again once a fake tensor is written to it. A number from a
    fake tensor or unknown memory is made up: 1, or False for a condition. But all numbers are finite, with what follows
    from that. `asked` has the lines of the user's code that asked for such numbers. The mode starts with the first fake
    tensors, because weight files are not read in such a mode. `close` ends it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.unknown = set[StorageWeakRef]()  # real memory; a weak reference keeps the address taken
        self.finite: Any = WeakIdKeyDictionary()  # fake tensor -> the value that follows for all elements
        self.asked = Asked()
        self.is_total = False  # whether all operations return fake tensors
        self.mode = ExitStack()
        self.has_begun = False

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make all tensors created in this context fake."""
        if not self.has_begun:
            self.has_begun = True
            self.mode.enter_context(self)
        with self.fake:
            yield

    def close(self) -> None:
        self.mode.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE and isinstance(args[0], FakeTensor):  # more than half of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(kind not in PLAIN for kind in types):  # a DTensor calls this again with its local tensors
            return NotImplemented
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if self.is_total and function is not NUMBER and not any(each.is_meta for each in tensors):
            self._note_written(function, args)
            return self._faked(function, args, kwargs)
        fake = [each for each in tensors if self.is_fake(each)]
        if fake and not self._only_allots(function, fake):
            if function is NUMBER:
                self.asked.note(sys._getframe(1))
                return _number(args[0], self.finite.get(args[0]))
            is_filled = function.overloadpacket in FILLING and len(fake) == 1 and fake[0] is args[0]
            if is_filled and self._is_whole_memory(args[0]):
                self.unknown.discard(_storage(args[0]))
                return function(*args, **kwargs)
            self._note_written(function, args)
            result = self._faked(function, args, kwargs)
            if isinstance(result, Tensor):
                name = function.overloadpacket.__name__
                value = value_if_finite(name, args, result, self.finite.get)
                if value is not None:
                    self.finite[result] = value
            return result
        if str(kwargs.get("device")) == "meta" or any(each.is_meta for each in tensors):
            return function(*args, **kwargs)
        if not tensors and _is_large(args):
            return self._faked(function, args, kwargs)
        result = function(*args, **kwargs)
        if function.overloadpacket in UNINITIALIZED:
            self.unknown.add(_storage(result.zero_()))
        return result

    def _only_allots(self, function: Any, fake: list[Tensor]) -> bool:
        """Return whether an operation only gives real tensors other memory, as `copy.deepcopy` does."""
        is_memory = function.overloadpacket in UNINITIALIZED or function.overloadpacket is torch.ops.aten.set_
        return is_memory and not any(isinstance(tensor, FakeTensor) for tensor in fake)

    def is_fake(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return True
        return bool(self.unknown) and not tensor.is_meta and _storage(tensor) in self.unknown

    def _is_whole_memory(self, tensor: Tensor) -> bool:
        """Return whether a tensor is real and has no memory in common with elements of others."""
        if isinstance(tensor, FakeTensor):
            return False
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()

    def _faked(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on fake tensors. A fake condition selects all places."""
        _require_types(function, args)
        with self.fake:
            if function.overloadpacket is torch.ops.aten.nonzero:
                return torch.zeros(args[0].numel(), args[0].ndim, dtype=torch.long)
            if function.overloadpacket is torch.ops.aten.masked_select:
                return torch.broadcast_tensors(args[0], args[1])[0].flatten()
            if function.overloadpacket is torch.ops.aten._grouped_mm and args[0].dtype != torch.bfloat16:
                return _product_of_groups(*args[:2], *args[2:3], **kwargs)
            if function.overloadpacket is torch.ops.aten.index:
                args = (args[0], [place for each in args[1] for place in _places(each)])
            return function(*args, **kwargs)

    def _note_written(self, function: Any, args: Any) -> None:
        if not function._schema.is_mutable:
            return
        for argument, given in zip(function._schema.arguments, args, strict=False):
            if argument.is_write:
                for each in tree_leaves(given):
                    if isinstance(each, Tensor) and not isinstance(each, FakeTensor) and not each.is_meta:
                        self.unknown.add(_storage(each))


def _require_types(function: Any, args: Any) -> None:
    """Raise RuntimeError, as for real tensors, if the types of the tensors are not the same, or labels not integers."""
    packet = function.overloadpacket
    tensors = [each for each in args if isinstance(each, Tensor)]
    compared = tensors if packet in OF_ONE_TYPE else []
    if packet in ASSIGNING:
        compared = [tensors[0], tensors[-1]]
    for tensor in compared:
        if tensor.dtype != compared[0].dtype:
            raise RuntimeError(
                f"{packet}: tensors of types {compared[0].dtype} and {tensor.dtype}. Convert one of them"
            )
    if packet is torch.ops.aten.nll_loss_forward and args[1].dtype not in (torch.long, torch.uint8):
        raise RuntimeError(f"{packet}: the labels are {args[1].dtype}. Convert them to torch.long")


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Return the indices that a condition stands for, one for each of its dimensions."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [torch.zeros(index.numel(), dtype=torch.long) for _ in range(index.ndim)]


def _product_of_groups(a: Tensor, b: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """Return a tensor with the shape of `F.grouped_mm`; torch's own rule only supports bf16 (2.13)."""
    groups = [len(offs)] if offs is not None and a.ndim == b.ndim == 2 else []
    groups = list(a.shape[:1]) if a.ndim == b.ndim == 3 else groups
    return torch.empty(*groups, a.shape[-2], b.shape[-1], dtype=a.dtype)


def _number(tensor: Tensor, value: float | None) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return bool(value)
    value = 1 if value is None else value
    return float(value) if tensor.dtype.is_floating_point else int(value)


def _is_large(args: Any) -> bool:
    """Return whether a function without tensor arguments creates a large tensor from these arguments."""
    sizes = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) > LARGE
