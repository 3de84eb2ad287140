"""What of a block's forward is kept for its backward, and where."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
}
MATMULS = {"aten::mm", "aten::addmm", "aten::_grouped_mm"}
COMMUNICATION = {"_c10d_functional::reduce_scatter_tensor"}
NARROW = 8  # a matrix that is this many times longer than wide, such as LoRA's


def wrap_forward(
    block: nn.Module, checkpointing: Literal["none", "selective", "full"], compile: bool, offload: bool
) -> None:
    """Replace `block.forward` by one that recomputes in backward (`full`: all of it; `selective`: all but attention,
    communication, products that are narrow and every second wide one), that is compiled with that, and that keeps what
    is saved in host memory if `offload`."""
    forward = block.forward
    if checkpointing != "none":
        forward = _recomputing(forward, {"context_fn": _save_expensive} if checkpointing == "selective" else {})
    if compile:
        forward = torch.compile(forward, fullgraph=True)
    if offload:  # outside of what is compiled: there hooks see what the compiled forward keeps
        forward = _offloading(block, forward)
    block.forward = forward


def _recomputing(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputing(*args: Any, **kwargs: Any) -> Any:  # a function, not a partial: the compiler reads its code
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputing


def _save_expensive() -> Any:
    wide = {"forward": 0, "recompute": 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.name()
        save = name in ATTENTION | COMMUNICATION
        if name in MATMULS:
            matrix = args[2] if name == "aten::addmm" else args[1]
            inner, outer = matrix.shape[-2:]
            if max(inner, outer) >= NARROW * min(inner, outer):  # a narrow result costs no room, a narrow input no time
                save = outer < inner
            else:
                phase = "recompute" if context.is_recompute else "forward"
                wide[phase] += 1
                save = wide[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _offloading(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    pin = torch.cuda.is_available()

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        weights = {_storage(parameter) for parameter in block.parameters()}  # which stay on the device anyway

        def to_host(tensor: Tensor) -> tuple[Tensor, torch.device | None]:
            if _storage(tensor) in weights:
                return tensor, None
            host = torch.empty_like(tensor, device="cpu", pin_memory=pin)
            return host.copy_(tensor, non_blocking=pin), tensor.device

        def back(packed: tuple[Tensor, torch.device | None]) -> Tensor:
            tensor, device = packed
            return tensor if device is None else tensor.to(device, non_blocking=pin)

        with saved_tensors_hooks(to_host, back):
            return forward(*args, **kwargs)

    return offloaded


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
