"""What of a block's forward is kept for its backward."""

import functools
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._flash_attention_forward.default,
]
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default]
COMMUNICATION = [torch.ops._c10d_functional.reduce_scatter_tensor.default]
NARROW = 8  # a matrix that is this many times longer than wide, such as LoRA's


def save_less(block: nn.Module, checkpointing: Literal["none", "selective", "full"], offload: bool) -> None:
    """Replace `block.forward` by one that recomputes in backward (`full`: all of it; `selective`: all but attention,
    communication, products that are narrow and every second wide one), and that keeps what is saved in host memory if
    `offload`."""
    forward = block.forward
    if checkpointing == "full":
        forward = functools.partial(checkpoint, forward, use_reentrant=False)
    elif checkpointing == "selective":
        forward = functools.partial(checkpoint, forward, use_reentrant=False, context_fn=_save_expensive)
    if offload:
        forward = _offloading(forward)
    block.forward = forward


def _save_expensive() -> Any:
    wide = {"forward": 0, "recompute": 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operation in ATTENTION + COMMUNICATION
        if operation in MATMULS:
            matrix = args[2] if operation == torch.ops.aten.addmm.default else args[1]
            inner, outer = matrix.shape[-2:]
            if max(inner, outer) >= NARROW * min(inner, outer):  # a narrow result costs no room, a narrow input no time
                save = outer < inner
            else:
                phase = "recompute" if context.is_recompute else "forward"
                wide[phase] += 1
                save = wide[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _offloading(forward: Any) -> Any:
    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    return offloaded
