"""Count the bytes that operations inside a `with` read and write, assuming no cache. Also works on `meta`."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh"}


class BytesMoved(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = operation(*args, **kwargs)
        if not operation.is_view and operation.overloadpacket.__name__ not in FREE:
            read = {name: value for name, value in kwargs.items() if name != "out"}
            inputs = [each for each in tree_leaves((args, read)) if isinstance(each, torch.Tensor)]
            if operation.overloadpacket.__name__ in ("copy_", "zero_", "fill_", "_foreach_copy_"):
                inputs = inputs[1:]  # the first is only written
            if operation.overloadpacket.__name__ in ("embedding", "index", "gather"):
                inputs = [*inputs[1:], output]  # only the selected rows of the table are read
            outputs = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
            self.total += sum(each.numel() * each.itemsize for each in (*inputs, *outputs))
        return output
