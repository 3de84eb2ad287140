"""Forwards without gradients, one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tune.distributed.parallelize import gathered


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Within, weights do not change, and forwards of `model` have no gradients: it is in eval mode, its weights are
    gathered, and packed on a CPU; nothing is compiled, as blocks would be for every shape. All processes enter it
    together."""
    training = model.training
    model.eval()
    try:
        with gathered(model), torch.compiler.set_stance("eager_on_recompile"), torch.no_grad(), PackedWeights():
            yield
    finally:
        model.train(training)


class PackedWeights(TorchFunctionMode):
    """Within, on an x86 CPU, products with parameters are those of oneDNN, from copies of them in an order of its own: it
    takes a half to two thirds of the time for up to 32 tokens, and somewhat less for many. Only where nothing needs a
    gradient, and weights do not change."""

    def __init__(self) -> None:
        super().__init__()
        is_x86 = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
        has_bf16 = is_x86 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.dtypes = (torch.float32, torch.bfloat16)[: is_x86 + has_bf16]
        self.packed: dict[nn.Parameter, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and not kwargs:
            input, weight, bias = (*args, None)[:3]
            if type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype in self.dtypes:
                if weight not in self.packed:
                    self.packed[weight] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
                return torch.ops.mkldnn._linear_pointwise(input, self.packed[weight], bias, "none", [], "")
        return function(*args, **(kwargs or {}))
