"""Weights with shapes but no values. Results computed with them have only shapes; everything else is computed."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

LARGE = 1 << 20  # elements: larger tensors are not allocated
NUMBER = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default
PLAIN = {Tensor, torch.nn.Parameter, FakeTensor}
UNINITIALISED = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}  # fmt: skip


class FakeWeights(TorchDispatchMode):
    """Operations on fake tensors return fake tensors; other operations are computed, so known numbers stay.

    Uninitialized memory is fake too, and so is a tensor that a fake one was written to. A number from a fake tensor is
    1, or False for a condition; `asked` counts these numbers. The mode starts with the first fake tensors, because
    weight files are not read in such a mode. `close` ends it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.written = WeakIdKeyDictionary()  # tensors that fake ones were written to
        self.asked = 0
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
        if any(self.is_fake(each) for each in tensors):
            if function is NUMBER:
                self.asked += 1
                return _number(args[0])
            self._note_written(function, args)
            return self._faked(function, args, kwargs)
        is_meta = str(kwargs.get("device")) == "meta" or any(each.is_meta for each in tensors)
        if not is_meta and (function.overloadpacket in UNINITIALISED or (not tensors and _is_large(args))):
            return self._faked(function, args, kwargs)
        return function(*args, **kwargs)

    def is_fake(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) or tensor in self.written

    def _faked(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on fake tensors. A fake condition selects all places."""
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
                    if isinstance(each, Tensor) and not isinstance(each, FakeTensor):
                        self.written[each] = True


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


def _number(tensor: Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1


def _is_large(args: Any) -> bool:
    """Return whether a function without tensor arguments creates a large tensor from these arguments."""
    sizes = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) > LARGE
