"""Activation checkpointing, compilation and activation offloading of a block."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias

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
NARROW = 8  # a matrix is narrow if the ratio of its sides is at least this, as in LoRA

KINDS = 64  # limit of graphs that the compiler specializes for a block; torch's own limit is 8
Layout: TypeAlias = tuple[torch.device, torch.Size, tuple[int, ...]]


def wrap_forward(
    block: nn.Module,
    checkpointing: Literal["none", "selective", "full"],
    compile: bool,
    offload: bool,
    backwards_wait: bool = False,
) -> None:
    """Wrap the forward of `block` with activation checkpointing, torch.compile and offloading of saved tensors.

    `full` recomputes the whole block in backward. `selective` saves the results of attention, communication, matrix
    products with a narrow result, and every second of the other products.

    Other forwards may run before a backward, so recomputation restores the dropout keys of its own forward. In a
    compiled block the keys are inputs of the graph, which keeps them; with pipeline stages, whose forwards always wait,
    the block is compiled without its checkpointing (`backwards_wait`).
    """
    adapted: list[Any] = [module for module in block.modules() if getattr(module, "dropout", 0.0)]
    adapted = [layer for layer in adapted if hasattr(layer, "dropout_keys")]
    if compile and not backwards_wait:
        adapted = []
    if checkpointing != "none":
        options = {"context_fn": _save_expensive} if checkpointing == "selective" else {}
        checkpointed = functools.partial(_checkpointed_with_keys, adapted=adapted) if adapted else _checkpointed
        wrap(block, Wrap.CHECKPOINT, functools.partial(checkpointed, options=options))
    if compile:  # all blocks share one code object, with a graph each for training, validation, generation, frozen ...
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS)
        # Two things cannot be in a graph: the host counts exchanged rows of experts and resets dropout keys.
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
    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        saved = Offloaded({_storage(parameter) for parameter in block.parameters()})
        with saved_tensors_hooks(saved.pack, saved.unpack):
            output = forward(*args, **kwargs)
        if before := saved.before():
            before.leave_device()
        return output

    return offloaded


class Offloaded:
    """The tensors that one forward of a block saves for backward, kept in host memory in between. Storages in
    `weights` stay on the device.

    On a GPU the copies run on a separate stream: to the host during the forward of the next block, and back during the
    backward before this one. Device memory is allocated and freed on the compute stream after it has waited for the
    copies. So the device holds the tensors of at most two blocks, however far the host is ahead.
    """

    newest: ClassVar[Callable[[], "Offloaded | None"]] = staticmethod(lambda: None)

    def __init__(self, weights: set[int]):
        self.before, self.weights = Offloaded.newest, weights  # the previous forward, if its backward is due
        Offloaded.newest = weakref.ref(self)
        self.numbers: dict[Any, int] = {}  # index of each saved tensor; several operations may save the same one
        self.uses: list[int] = []
        self.on_device: list[Tensor | None] = []
        self.on_host: list[tuple[Tensor, Layout]] = []
        self.copied: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | int:
        storage = _storage(tensor)
        if storage in self.weights:
            return tensor
        key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        if key not in self.numbers:
            self.numbers[key] = len(self.uses)
            once = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]  # drop repeats of `expand`
            host = torch.empty(once.shape, dtype=once.dtype, device="cpu", pin_memory=torch.cuda.is_available())
            self.uses.append(0)
            self.on_device.append(tensor.detach())
            self.on_host.append((host, (tensor.device, tensor.shape, tensor.stride())))
            self._copy([(host, once)], tensor.device)
        number = self.numbers[key]
        self.uses[number] += 1
        return number

    def unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.uses[packed] = max(self.uses[packed], 1)  # 0 in a second backward of a retained graph
        self.return_to_device()
        if before := self.before():
            before.return_to_device()
        self._wait()
        tensor = self.on_device[packed]
        assert tensor is not None
        self.uses[packed] -= 1
        if self.uses[packed] == 0:
            self.on_device[packed] = None
        return tensor

    def leave_device(self) -> None:
        """Free the device memory once all tensors are on the host."""
        self._wait()
        self.numbers.clear()
        self.on_device = [None] * len(self.on_device)

    def return_to_device(self) -> None:
        """Start copying back the tensors that are still needed and not on the device."""
        copies = []
        for number in reversed(range(len(self.uses))):
            if self.uses[number] and self.on_device[number] is None:
                host, (device, shape, strides) = self.on_host[number]  # a compiled backward expects these strides
                tensor = torch.empty_strided(host.shape, strides, dtype=host.dtype, device=device)
                copies.append((tensor, host))
                self.on_device[number] = tensor.expand(shape)
        if copies:
            self._copy(copies, copies[0][0].device)

    def _copy(self, copies: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
        stream = _stream_of_copies(device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for to, source in copies:
                to.copy_(source, non_blocking=stream is not None)
        self.copied = None if stream is None else stream.record_event()

    def _wait(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream(self.copied.device).wait_event(self.copied)


@functools.cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" and torch.cuda.is_available() else None


def _storage(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage; a DTensor has none, so its local shard's."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.untyped_storage()._cdata
