"""What a forward and a backward of a process take, block by block, from fake tensors.

A model with one block of each kind (and the first one) stands for the whole: blocks of a kind are alike.
"""

import copy
import itertools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tune.collators import Batch
from tune.distributed import DTYPES, repeated_blocks, share, stored_dtype, units_of, wrap_forward
from tune.losses import chunks
from tune.models import attention, balance_loss
from tune.preflight.devices import Device
from tune.quantization import nf4

FREE = ("empty", "detach", "lift", "alias")  # operations that touch no element


@dataclass(frozen=True)
class Interval:
    """Between two marks: bytes alive at its beginning, above that at its peak, and what it takes in seconds."""

    live: float
    extra: float
    compute: float
    products: float  # of these, what products would take if memory were no limit
    exchange: float  # in collectives that wait for each other: those of tensor parallelism


@dataclass
class Unit:
    """What FSDP gathers at one time, of one process of a tensor-parallel group: bytes as stored and as gathered, and
    of the trained parameters their number, bytes of their gradients and bytes as stored."""

    stored: float = 0.0
    gathered: float = 0.0
    trained: float = 0.0
    gradients: float = 0.0
    master: float = 0.0

    def add(self, other: "Unit", times: int = 1) -> "Unit":
        return Unit(*(getattr(self, name) + times * getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Trace:
    """Of each kind of block its number, unit and intervals; the other units, those beside blocks and the root last."""

    counts: list[int]
    blocks: list[Unit]
    others: list[Unit]
    embed: Interval
    forward: list[Interval]
    loss: Interval
    backward: list[Interval]
    rest: Interval

    def scaled(self, two: "Trace", rows: int) -> "Trace":
        """The trace of so many rows, by the straight line through this one of one row and that of two."""
        names = ("embed", "forward", "loss", "backward", "rest")
        return replace(self, **{name: _line(getattr(self, name), getattr(two, name), rows) for name in names})


def _line(one: Any, two: Any, rows: int) -> Any:
    if isinstance(one, list):
        return [_line(*pair, rows) for pair in zip(one, two, strict=True)]
    pairs = zip(vars(one).values(), vars(two).values(), strict=True)
    return Interval(*(a + (rows - 1) * (b - a) for a, b in pairs))


@dataclass
class Recorder(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and the seconds of operations on `device` by its roofline."""

    device: Device
    dtype: str
    group: int
    fused: bool
    live: float = 0
    peak: float = 0
    compute: float = 0.0
    products: float = 0.0
    exchange: float = 0.0
    storages: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def ignore(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage

    def mark(self) -> tuple[float, ...]:
        found = self.live, self.peak, self.compute, self.products, self.exchange
        self.peak, self.compute, self.products, self.exchange = self.live, 0.0, 0.0, 0.0
        return found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operations come here one by one
        output = function(*args, **(kwargs or {}))
        outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self.storages:
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                self.storages[key] = weakref.ref(storage, self._free(key, storage.nbytes()))
        name = function._schema.name
        if not (function.is_view or name.removeprefix("aten::").startswith(FREE)):
            self._cost(function, name, args, kwargs or {}, output, outputs)
        return output

    def _free(self, key: int, size: int) -> Any:
        def free(_: Any) -> None:
            self.live -= size
            del self.storages[key]

        return free

    def _cost(self, function: Any, name: str, args: Any, kwargs: Any, output: Any, outputs: list[Tensor]) -> None:
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        moved: float = sum(each.numel() * each.itemsize for each in (*inputs, *outputs))
        if name.startswith(("_c10d_functional::", "c10d::")):
            if "wait" not in name:
                self.exchange += self.device.transfer(moved / 2, self.group)
            return
        flops = _flops(function, name, args, kwargs, output)
        if self.fused and not flops:
            moved /= 3  # a compiler reads and writes once what several operations in a row do
        self.compute += self.device.seconds(flops, moved, self.dtype)
        self.products += self.device.seconds(flops, 0, self.dtype) if flops else 0


def _flops(function: Any, name: str, args: Any, kwargs: Any, output: Any) -> float:
    if "attention" in name or "varlen_attn" in name:
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        longest = key.shape[-2] if query.dim() == 4 else min(len(key), args[9 if backward else 6])
        return (5 if backward else 2) * query.numel() * longest  # two products, five in backward; half, as it is causal
    if name.startswith("tune::product_by_group"):
        return 2.0 * args[0].numel() * output.shape[-1]
    if name == "aten::_grouped_mm":
        return 2.0 * args[0].numel() * args[1].shape[-1]
    known = flop_registry.get(function.overloadpacket)
    return float(known(*args, **kwargs, out_val=output)) if known else 0.0


def kinds_of(model: nn.Module) -> list[int]:
    """The kind of each block: blocks of one kind have parameters of the same shapes, types and settings."""
    layers = getattr(getattr(model, "config", None), "layers", None)
    kinds: dict[Any, int] = {}
    found = []
    for index, block in enumerate(repeated_blocks(model)):
        parameters = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())
        looks = (parameters, layers[index] if layers else getattr(block, "attention_type", type(block)))
        found.append(kinds.setdefault(looks, len(kinds)))
    return found


def shorten(model: nn.Module) -> tuple[nn.Module, list[int], list[int]]:
    """A copy of `model`, on the meta device, with its first block and one of each kind; for each kind the block that
    stands for it, and how many there are."""
    kinds = kinds_of(model)
    kept = sorted({0, *(_another(kinds, kind) for kind in set(kinds))})
    blocks = repeated_blocks(model)
    places = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and list(m) == blocks)
    everything = places._modules
    config: Any = getattr(model, "config", None)
    try:
        places._modules = {str(new): blocks[old] for new, old in enumerate(kept)}
        short: Any = copy.deepcopy(model)
    finally:
        places._modules = everything
    if layers := getattr(config, "layers", None):
        short.config = replace(config, layers=tuple(layers[old] for old in kept))
    elif config is not None:
        short.config.num_hidden_layers = len(kept)
    stands = [max(at for at, old in enumerate(kept) if kinds[old] == kind) for kind in sorted(set(kinds))]
    return short, stands, [kinds.count(kind) for kind in sorted(set(kinds))]


def _another(kinds: list[int], kind: int) -> int:
    """The second block of a kind, or its only one."""
    places = [at for at, each in enumerate(kinds) if each == kind]
    return next((at for at in places if at), places[0])


def trace(
    short: tuple[nn.Module, list[int], list[int]],
    loss_fn: Any,
    device: Device,
    *,
    rows: int,
    seq_len: int,
    dtype: str,
    master_dtype: str,
    checkpointing: Any,
    plain: bool,
    accumulates: bool,
    compile: bool,
    mesh: DeviceMesh | None = None,
) -> Trace:
    """Run a step of the shortened model on fake tensors. With `plain`, FSDP neither gathers nor casts; `mesh` is that
    of tensor parallelism."""
    original, stands, counts = short
    model = copy.deepcopy(original)
    blocks = repeated_blocks(model)
    units = units_of(model, blocks)
    if mesh is not None:
        share(model, blocks, units, mesh)
    recorder = Recorder(device, dtype, mesh.size() if mesh is not None else 1, compile)
    ones = np.ones((1, rows * seq_len), dtype=np.int64)
    batch = Batch.of(ones, labels=ones, documents=np.arange(rows).repeat(seq_len)[None])
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        found = _materialise(model, units, dtype, master_dtype, plain)
        for block in blocks:
            wrap_forward(block, checkpointing, False, False)
        of_blocks, others = found[: len(blocks)], found[len(blocks) :]
        stack.enter_context(_kernels(device))
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.ignore(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        stack.enter_context(recorder)
        for _ in range(1 + (plain and accumulates)):
            marks = _step(model, blocks, batch, loss_fn, recorder)
    between = [Interval(a[0], b[1] - a[0], *b[2:]) for a, b in itertools.pairwise(marks)]
    last = len(blocks)
    embed, loss, rest = between[0], between[last + 1], between[-1]
    forward, backward = between[1 : last + 1], between[last + 2 : -1][::-1]
    if len(backward) < last:  # below the first adapter there is nothing to do
        backward = [Interval(0, 0, 0, 0, 0)] * (last - len(backward)) + backward
    return Trace(
        counts,
        [of_blocks[at] for at in stands],
        others,
        replace(embed, live=between[1].live - embed.live),
        [replace(forward[at], live=between[at + 2].live - forward[at].live) for at in stands],
        replace(loss, live=between[last + 2].live - loss.live),
        [backward[at] for at in stands],
        rest,
    )


@contextmanager
def _kernels(device: Device) -> Iterator[None]:
    """Attention by the kernel of the device; weights of 4 bits become whole ones at once; the first process's rows."""

    def whole(codes: Tensor, scales: Tensor, ranges: Any, dtype: torch.dtype, pairs: Any = None) -> Tensor:
        return torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device)

    def first(tensor: DTensor) -> tuple[Tensor, tuple[slice, ...]]:
        local = tensor.to_local()
        return local, tuple(slice(0, size) for size in local.shape)

    with (
        mock.patch.object(attention, "has_flash", lambda tensor: device.flash),
        mock.patch.object(nf4, "dequantize", whole),
        mock.patch.object(chunks, "local_shard", first),
    ):
        yield


def _step(model: nn.Module, blocks: list[nn.Module], batch: Batch, loss_fn: Any, recorder: Recorder) -> list[Any]:
    """The marks of a forward and a backward: at the beginning of each block, before the loss, and back again."""
    marks = [recorder.mark()]
    handles = []

    def at(hidden: Any) -> None:
        marks.append(recorder.mark())
        tensor = next(each for each in tree_leaves(hidden) if isinstance(each, Tensor))
        if tensor.requires_grad:
            tensor.register_hook(lambda _: marks.append(recorder.mark()))

    for block in blocks:
        handles.append(
            block.register_forward_pre_hook(lambda module, args, kwargs: at((args, kwargs)), with_kwargs=True)
        )
    handles.append(blocks[-1].register_forward_hook(lambda module, args, output: at(output)))
    try:
        loss = model(batch, loss_fn) + balance_loss(model)
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    del loss
    return [*marks, recorder.mark()]


def _materialise(model: nn.Module, units: list[nn.Module], dtype: str, master_dtype: str, plain: bool) -> list[Unit]:
    """Give `model` fake parameters as a forward sees them; what each of the `units` has of its own."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    taken: set[nn.Module] = set()
    found = []
    for unit in units:
        modules = [module for module in unit.modules() if module not in taken]
        taken |= set(modules)
        mine = [(m, n, p) for m in modules for n, p in m._parameters.items() if p is not None]
        trained = [m for m, _, p in mine if p.requires_grad and not getattr(m, "casts_parameters", False)]
        casts = not plain and dtype != master_dtype and bool(trained)
        total = Unit()
        for module, name, parameter in mine:
            if parameter not in made:
                stored = stored_dtype(module, parameter, dtype, master_dtype)
                seen = DTYPES[dtype] if casts and parameter.is_floating_point() else stored
                made[parameter] = _fake(parameter, seen)
                number = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
                own = number * parameter.requires_grad
                gathered = 0 if plain else number * seen.itemsize
                total = total.add(
                    Unit(number * stored.itemsize, gathered, own, own * seen.itemsize, own * stored.itemsize)
                )
            module._parameters[name] = made[parameter]
        found.append(total)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return found


def _fake(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cpu"), parameter.requires_grad)
    local = torch.empty(parameter.to_local().shape, dtype=dtype, device="cpu")
    place = parameter.device_mesh, parameter.placements
    whole = DTensor.from_local(local, *place, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(whole, parameter.requires_grad)
