"""What an optimizer keeps of each trained parameter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 512


def bytes_of_states(make: Callable[..., Any], settings: Any, dtype: torch.dtype = torch.float32) -> float:
    """Bytes that the optimizer that `make(settings, groups)` gives keeps for each element of a matrix, by a step."""
    matrix = nn.Parameter(torch.zeros(ROWS, ROWS, dtype=dtype))
    matrix.grad = torch.zeros_like(matrix)
    optimizer = make(settings, [{"params": [matrix], "in_blocks": True}])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    states = [each for each in optimizer.state[matrix].values() if isinstance(each, Tensor)]
    return sum(map(_size, states)) / matrix.numel()


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, or of those that a tensor subclass is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.itemsize
    return sum(_size(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
