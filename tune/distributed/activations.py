"""Activation checkpointing, compilation and activation offload of a block."""

import functools
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tune.distributed.wrapping import Forward, Wrap, wrap

ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "flex_attention",
}
MATMULS = {"aten::mm", "aten::addmm", "aten::_grouped_mm"}
COMMUNICATION = {f"_c10d_functional::{name}" for name in ("reduce_scatter_tensor", "all_reduce", "all_to_all_single")}
NARROW = 8  # ratio of the sides from which on a matrix is narrow, as LoRA's are

KINDS = 64  # of forwards that the compiler may specialize a block for; torch's own limit is 8
Layout: TypeAlias = tuple[torch.device, torch.Size, tuple[int, ...]]


def wrap_forward(
    block: nn.Module,
    checkpointing: Literal["none", "selective", "full"],
    compile: bool,
    offload: bool,
    backwards_wait: bool = False,
) -> None:
    """Put activation checkpointing, torch.compile and offload of saved tensors to the host around the forward of
    `block`.

    `full` recomputes the whole block in backward. `selective` saves the results of attention, communication, matrix
    products that make a narrow result, and every second of the other products.

    Where `backwards_wait` for forwards of other micro-batches, what is recomputed has the dropout keys of its own.
    """
    adapted: list[Any] = [module for module in block.modules() if backwards_wait and hasattr(module, "dropout_keys")]
    adapted = [layer for layer in adapted if layer.dropout]
    if checkpointing != "none":
        options = {"context_fn": _save_expensive} if checkpointing == "selective" else {}
        checkpointed = functools.partial(_checkpointed_with_keys, adapted=adapted) if adapted else _checkpointed
        wrap(block, Wrap.CHECKPOINT, functools.partial(checkpointed, options=options))
    if compile:  # all blocks share one code: training, validation, generation, and frozen blocks are a kind each
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS)
        # No parts of a graph: the host counts rows of experts that are exchanged, and sets dropout keys anew.
        is_whole = all(getattr(module, "expert_mesh", None) is None for module in block.modules())
        is_inside = not is_whole or bool(adapted and checkpointing == "full")
        kind = Wrap.COMPILE_INSIDE if is_inside else Wrap.COMPILE
        wrap(block, kind, functools.partial(torch.compile, fullgraph=is_whole))
    if offload:
        wrap(block, Wrap.OFFLOAD, functools.partial(_offloaded, block))


def _checkpointed(forward: Forward, options: dict[str, Any]) -> Forward:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:  # a function, not a partial: the compiler reads its code
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return checkpointed


def _checkpointed_with_keys(forward: Forward, adapted: list[Any], options: dict[str, Any]) -> Forward:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        keys = adapted[0].dropout_keys

        def with_keys(*args: Any, **kwargs: Any) -> Any:
            for layer in adapted:
                layer.dropout_keys = keys
            return forward(*args, **kwargs)

        return checkpoint(with_keys, *args, use_reentrant=False, **options, **kwargs)

    return checkpointed


def _save_expensive() -> Any:
    wide = {"forward": 0, "recompute": 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.name()
        save = name in ATTENTION | COMMUNICATION
        if name in MATMULS:
            matrix = args[2] if name == "aten::addmm" else args[1]
            inner, outer = matrix.shape[-2:]
            # A narrow result takes little memory; a product with narrow inputs takes little time to repeat.
            if max(inner, outer) >= NARROW * min(inner, outer):
                save = outer < inner
            else:
                phase = "recompute" if context.is_recompute else "forward"
                wide[phase] += 1
                save = wide[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _offloaded(block: nn.Module, forward: Forward) -> Forward:
    pin = torch.cuda.is_available()

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        weights = {_storage(parameter) for parameter in block.parameters()}  # these stay on the device

        def to_host(tensor: Tensor) -> tuple[Tensor, Layout | None]:
            if _storage(tensor) in weights:
                return tensor, None
            once = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]  # what `expand` repeats
            host = torch.empty(once.shape, dtype=once.dtype, device="cpu", pin_memory=pin)
            return host.copy_(once, non_blocking=pin), (tensor.device, tensor.shape, tensor.stride())

        def to_device(packed: tuple[Tensor, Layout | None]) -> Tensor:
            host, layout = packed
            if layout is None:
                return host
            device, shape, strides = layout  # a compiled backward is made for these strides
            tensor = torch.empty_strided(host.shape, strides, dtype=host.dtype, device=device)
            return tensor.copy_(host, non_blocking=pin).expand(shape)

        with saved_tensors_hooks(to_host, to_device):
            return forward(*args, **kwargs)

    return offloaded


def _storage(tensor: Tensor) -> int:
    """What tells memory apart; of a DTensor, which has none itself, that of the process's shard."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.untyped_storage()._cdata
