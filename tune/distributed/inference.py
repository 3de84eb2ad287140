"""Repeated forwards without gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.distributed.parallelize import gathered

LARGE = 2**17  # elements of a weight; above this, a packed copy pays off


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """A context for forwards of `model` without gradients. The model is in eval mode and its weights are gathered; on a
    CPU they are also packed (`PackedWeights`). Nothing is recompiled for new shapes. Weights must not change inside
    the context. All processes must enter it together."""
    training = model.training
    model.eval()
    try:
        with gathered(model), torch.compiler.set_stance("eager_on_recompile"), torch.no_grad(), PackedWeights(model):
            yield
    finally:
        model.train(training)


@contextmanager
def without_fsdp_hooks(model: nn.Module) -> Iterator[None]:
    """A context in which forwards of `model` skip FSDP's hooks; the weights must be gathered. Inside `inference`, FSDP
    has nothing to do but takes time at each block, and its streams cannot be captured in a CUDA graph."""
    kept = [
        (hooks, dict(hooks))
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        if any(_is_fsdp(hook) for hook in hooks.values())
    ]
    for hooks, all_of_them in kept:
        for number, hook in all_of_them.items():
            if _is_fsdp(hook):
                del hooks[number]
    try:
        yield
    finally:
        for hooks, all_of_them in kept:
            hooks.clear()
            hooks.update(all_of_them)


def _is_fsdp(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


class PackedWeights:
    """A reusable context in which each large weight of `model` on an x86 CPU is a `PackedWeight`. The packed copies are
    kept, so the weights must not change between the first and the last use."""

    def __init__(self, model: nn.Module):
        is_x86 = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
        has_bf16 = is_x86 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        dtypes = (torch.float32, torch.bfloat16)[: is_x86 + has_bf16]
        self.places = [
            (module._parameters, name, weight)
            for module in model.modules()
            for name, weight in module._parameters.items()
            if type(weight) is nn.Parameter and weight.is_cpu and weight.dtype in dtypes
            if weight.dim() == 2 and weight.numel() >= LARGE
        ]
        self.packed = {weight: weight.detach().as_subclass(PackedWeight) for *_, weight in self.places}

    def __enter__(self) -> None:
        for parameters, name, weight in self.places:
            parameters[name] = self.packed[weight]  # type: ignore[assignment]

    def __exit__(self, *error: Any) -> None:
        for parameters, name, weight in self.places:
            parameters[name] = weight


class PackedWeight(Tensor):
    """A weight `[out, in]` with a copy in oneDNN's memory layout, which only `F.linear` uses. With it `F.linear` takes
    a half to two thirds of the time for up to 32 tokens, and slightly less time for many. All other functions see the
    weight as it is. It has no gradients. It is packed at its first product, so an embedding never is."""

    packed: Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is not F.linear or kwargs:
                return function(*args, **(kwargs or {}))
            input, weight, bias = (*args, None)[:3]
            if not hasattr(weight, "packed"):
                weight.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            return torch.ops.mkldnn._linear_pointwise(input, weight.packed, bias, "none", [], "")
