"""What a forward and a backward of a process take, block by block, from fake tensors.

A model with one block of each kind (and the first one) stands for the whole: blocks of a kind are alike.
"""

import copy
import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from tune import fused
from tune.collators import Batch
from tune.devices import Device
from tune.distributed import (
    DTYPES,
    Stage,
    cast_by_fsdp,
    repeated_blocks,
    share,
    share_experts,
    shared_experts,
    split,
    stored_dtype,
    units_of,
    wrap_forward,
)
from tune.losses import chunks
from tune.models import attention, flash, layers
from tune.peft import products
from tune.quantization import nf4

REDUCED = 4  # bytes of a gradient while FSDP reduces it: fp32
FREE = ("empty", "detach", "lift", "alias", "_unsafe_view")  # operations that touch no element
# Of their first argument these touch as many elements as they give or put there.
INDEX = ("embedding", "gather", "index", "index_select", "index_put_", "scatter_", "scatter_add_", "index_add_")


class Interval(NamedTuple):
    """Between two marks: bytes alive at its end that were not at its beginning, above that beginning at its peak, and
    what it takes in seconds."""

    live: float = 0.0
    extra: float = 0.0
    compute: float = 0.0
    products: float = 0.0  # of these, what products would take if memory were no limit
    exchange: float = 0.0  # in collectives that wait for each other: those of tensor parallelism


class Unit(NamedTuple):
    """What FSDP gathers at one time, of one process of a tensor-parallel group: bytes as gathered, and of the trained
    parameters those of their gradients, in the type of computation and in that of their reduction. FSDP shards the
    others: bytes as stored, and of the trained parameters their number and bytes as stored. They are those of all
    experts, of which the process gathers a share."""

    stored: float = 0.0
    gathered: float = 0.0
    trained: float = 0.0
    gradients: float = 0.0
    reduced: float = 0.0
    master: float = 0.0


def total(units: Iterable[Unit]) -> Unit:
    """All of them together."""
    return Unit(*(sum(sizes) for sizes in zip(Unit(), *units, strict=True)))


class Alike(NamedTuple):
    """Blocks of one kind: how many, and what one of them takes."""

    number: int
    unit: Unit
    forward: Interval
    backward: Interval


class Trace(NamedTuple):
    """In the order of a step; `rest` is the embedding's backward. `others` are units beside blocks, the root last."""

    embed: Interval
    blocks: list[Alike]
    loss: Interval
    rest: Interval
    others: list[Unit]

    @property
    def whole(self) -> Unit:
        """All units of a process."""
        return total([*(kind.unit for kind in self.blocks for _ in range(kind.number)), *self.others])

    @property
    def saved(self) -> float:
        """Bytes that all blocks keep for backward."""
        return sum(kind.number * kind.forward.live for kind in self.blocks)

    def stage(self, numbers: list[int], is_first: bool, is_last: bool) -> "Trace":
        """That of a stage of a pipeline which has so many blocks of each kind: the first has the embedding, the last
        the head, and both a tied one."""
        *embeddings, root = self.others
        kept = [kind._replace(number=number) for kind, number in zip(self.blocks, numbers, strict=True) if number]
        others = [*(embeddings if is_first else ()), root if is_last or (is_first and not embeddings) else Unit()]
        embed, loss, rest = self.embed, self.loss, self.rest
        if not is_first:  # what it receives is as large as what is embedded
            embed, rest = Interval(embed.live, embed.live), Interval()
        return Trace(embed, kept, loss if is_last else Interval(), rest, others)

    def scaled(self, two: "Trace", rows: int) -> "Trace":
        """The trace of so many rows, by the straight line through this one of one row and that of two."""
        return tree_map(lambda one, other: one + (rows - 1) * (other - one), self, two)


class Subject(NamedTuple):
    """A shortened model, of each kind of blocks the place in it and the places of all, and what is computed of it and a
    batch: a loss, or of a frozen model anything, in so many `passes` for each micro-batch."""

    model: nn.Module
    kinds: list[tuple[int, list[int]]]
    call: Callable[[Any, Batch], Any]
    dtype: str
    master_dtype: str
    compiled: bool = False
    plan: Any = None  # that of tensor parallelism
    loss_parallel: bool = True
    # A frozen one computes before the first step, "alone" or "beside" the weights of the trained one, or in its "head";
    # or it is the trained one, before the updates of a step.
    place: Literal["trained", "alone", "beside", "head", "rollout"] = "trained"
    passes: int = 0


class Recorder(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and the seconds of operations on `device` by its roofline."""

    def __init__(self, device: Device, dtype: str, fused: bool):
        super().__init__()
        self.device, self.dtype, self.fused = device, dtype, fused
        self.live = self.peak = self.compute = self.products = self.exchange = 0.0
        self.storages: dict[int, Any] = {}
        self.before_next: list[Any] = []  # called when an operation begins: what the one before took has been freed

    def ignore(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage

    def mark(self) -> Interval:
        """What is alive, and what has been since the mark before."""
        found = Interval(self.live, self.peak, self.compute, self.products, self.exchange)
        self.peak, self.compute, self.products, self.exchange = self.live, 0.0, 0.0, 0.0
        return found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # its own operations come here one by one
        if function is torch.ops.prim.device.default:  # autograd asks this of each tensor; nothing runs
            return args[0].fake_device
        while self.before_next:
            self.before_next.pop()()
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
        tensors = [each for each in (*tree_leaves(args), *outputs) if isinstance(each, Tensor)]  # `out=` is not read
        plain = name.removeprefix("aten::")
        sizes = [each.numel() * each.itemsize for each in tensors if plain not in INDEX or each is not args[0]]
        moved: float = sum(sizes) * (1 + (plain in INDEX))
        if name.startswith(("_c10d_functional::", "c10d::")):
            if "wait" not in name:  # to sum over all is to reduce and to gather
                rounds = 2 if name.endswith(("all_reduce", "allreduce_")) else 1
                boxed = [each for each in args if isinstance(each, torch.ScriptObject)]
                group = dist.ProcessGroup.unbox(boxed[0]) if len(boxed) else _resolve_process_group(args[-1])
                ranks = dist.get_process_group_ranks(group)
                self.exchange += self.device.transfer(rounds * max(sizes), len(ranks), max(ranks) - min(ranks) + 1)
            return
        attends = "attention" in name or "varlen_attn" in name
        flops = _flops(function, name, attends, args, kwargs, output)
        if self.fused and not flops:
            moved /= 3  # a compiler reads and writes once what several operations in a row do
        dtype = "fp8" if name == "aten::_scaled_mm" else self.dtype
        self.compute += self.device.seconds(flops, moved, dtype, attends)
        self.products += self.device.seconds(flops, 0, dtype, attends) if flops else 0


def _flops(function: Any, name: str, attends: bool, args: Any, kwargs: Any, output: Any) -> float:
    if attends:
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        longest = key.shape[-2] if query.dim() == 4 else min(len(key), args[9 if backward else 6])
        return (5 if backward else 2) * query.numel() * longest  # two products, five in backward; half, as it is causal
    if name.startswith(("tune::product_by_group", "aten::_grouped_mm")):
        return 2.0 * args[0].numel() * output.shape[-1]
    known = flop_registry.get(torch.ops.aten.addmm if name == "aten::addmm_" else function.overloadpacket)
    return float(known(*args, **kwargs, out_val=output)) if known else 0.0


def shorten(model: nn.Module) -> tuple[nn.Module, list[tuple[int, list[int]]]]:
    """A copy of `model`, on the meta device, with one block of each kind, and with the first one if not all is trained:
    below it there may be nothing to do. Of each kind the place of its block in the copy, and the places of all in the
    model. Blocks of a kind have parameters of the same shapes, types and settings."""
    layers = getattr(getattr(model, "config", None), "layers", None)
    kinds: dict[Any, list[int]] = defaultdict(list)
    for index, block in enumerate(repeated_blocks(model)):
        parameters = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())
        kinds[parameters, layers[index] if layers else getattr(block, "attention_type", type(block))].append(index)
    first = () if all(each.requires_grad for each in model.parameters()) else (0,)
    chosen = [next((each for each in places if each not in first), 0) for places in kinds.values()]
    kept = sorted({*first, *chosen})
    short: Any = copy.deepcopy(model)
    blocks = next(m for m in short.modules() if isinstance(m, nn.ModuleList) and list(m) == repeated_blocks(short))
    for index in reversed(range(len(blocks))):
        if index not in kept:
            del blocks[index]
    if layers:
        short.config = replace(short.config, layers=tuple(layers[index] for index in kept))
        short.stages = [Stage.whole(len(kept))]
    elif hasattr(short, "config"):
        short.config.num_hidden_layers = len(kept)
    return short, [(kept.index(one), places) for one, places in zip(chosen, kinds.values(), strict=True)]


def trace(
    subject: Subject, batch: Batch, device: Device, *,
    meshes: dict[str, DeviceMesh], checkpointing: Any, plain: bool, accumulates: bool,
) -> Trace:  # fmt: skip
    """Run a step of the shortened model on fake tensors, or a forward of a frozen one. With `plain`, FSDP neither
    gathers nor casts; `meshes` are those of the axes tp, cp and ep that are used."""
    model = copy.deepcopy(subject.model)
    blocks = repeated_blocks(model)
    if subject.place == "rollout" and not device.is_host:
        device = replace(device, launch=device.launch / 2)  # from a captured graph
    recorder = Recorder(device, subject.dtype, subject.compiled)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    units = _allocated(model, subject, plain, meshes, fake)
    if "cp" in meshes:
        split(model, meshes["cp"]["cp"])
    for block in blocks:
        wrap_forward(block, checkpointing, False, False)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.ignore(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    with fake, _kernels(device, recorder, checkpointing), recorder, torch.set_grad_enabled(subject.place == "trained"):
        for _ in range(1 + accumulates):
            begin, *marks = _step(blocks, lambda: subject.call(model, batch), recorder)
    if subject.place == "rollout":
        marks = marks[-len(blocks) - 2 :]  # those of the last forward
    between = [Interval(b.live - a.live, b.extra - a.live, *b[2:]) for a, b in itertools.pairwise([begin, *marks])]
    last = len(blocks)
    (embed, *forward), (loss, *backward) = between[: last + 1], between[last + 1 :]
    rest = backward.pop() if backward else Interval()  # a frozen model has no backward
    backward = [Interval()] * (last - len(backward)) + backward[::-1]  # none below the first adapter
    kept = [Alike(len(places), units[at], forward[at], backward[at]) for at, places in subject.kinds]
    return Trace(embed, kept, loss, rest, units[last:])


@contextmanager
def _kernels(device: Device, recorder: Recorder, checkpointing: Any) -> Iterator[None]:
    """Attention, adapters and chunks of logits as on the device; weights of 4 bits become whole ones in one kernel; a
    compiler reads twice what it casts to 8 bits; experts get as many tokens from each process."""
    chunk_tokens, kind = chunks.default_chunk_tokens, "cpu" if device.is_host else "cuda"

    def launch(programs: str, name: str, grid: Any, *arguments: Any, **options: Any) -> None:
        moved = sum(argument.nbytes for argument in arguments if isinstance(argument, Tensor))
        recorder.compute += device.seconds(0, moved, "")

    def whole(codes: Tensor, scales: Tensor, ranges: Any, dtype: torch.dtype, pairs: Any = None) -> Tensor:
        weight = torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device)
        recorder.compute += device.seconds(0, codes.nbytes + scales.nbytes + weight.nbytes, "")
        return weight

    def cast(call: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        before, found = recorder.compute, call(tensor, *args, **kwargs)
        recorder.compute = before + device.seconds(0, 2 * tensor.nbytes + tensor.numel(), "")
        return found

    def choose(*args: Any, **scoring: Any) -> attention.Choice:
        taken = of_device(*args, **scoring)
        return attention.Choice("flash") if taken.path == "flex" else taken  # which keeps as much

    of_device = attention.choose
    linears = sys.modules.get("torchao.float8.float8_linear") if recorder.fused else None  # its layers are imported
    name = "hp_tensor_to_float8_dynamic"
    with (
        mock.patch.object(linears, name, partial(cast, getattr(linears, name))) if linears else nullcontext(),
        mock.patch.object(attention, "capability", lambda _: device.attends_as),
        mock.patch.object(attention, "choose", choose),
        mock.patch.object(attention, "efficient", flash.flash),  # which keeps as much, and whose backward torch plans
        mock.patch.object(layers, "choose", choose),
        mock.patch.object(nf4, "dequantize", whole),
        mock.patch.object(products, "dequantize", whole),
        mock.patch.object(fused, "fits", lambda *_: device.capability is not None and not recorder.fused),
        mock.patch.object(fused, "launch", launch),
        mock.patch.object(products, "is_watched", lambda: checkpointing == "selective"),
        mock.patch.object(chunks, "default_chunk_tokens", lambda vocab, _: chunk_tokens(vocab, kind)),
    ):
        yield


def _step(blocks: list[nn.Module], call: Callable[[], Any], recorder: Recorder) -> list[Any]:
    """The marks of a forward and a backward: at the beginning of each block, before the loss, and back again."""
    marks = [recorder.mark()]

    def mark(*_: Any) -> None:
        marks.append(recorder.mark())

    def at(block: nn.Module, *given: Any) -> None:
        tensor = next(each for each in tree_leaves(given) if isinstance(each, Tensor))
        if tensor.requires_grad:
            tensor.register_hook(mark)
        recorder.before_next.append(mark)

    handles = [block.register_forward_pre_hook(at, with_kwargs=True) for block in blocks]
    handles.append(blocks[-1].register_forward_hook(lambda block, _, output: at(block, output)))
    try:
        result = call()
        if torch.is_grad_enabled():
            result.backward()
    finally:
        for handle in handles:
            handle.remove()
    del result
    return [*marks, recorder.mark()]


def _allocated(
    model: nn.Module, subject: Subject, plain: bool, meshes: dict[str, DeviceMesh], fake: FakeTensorMode
) -> list[Unit]:
    """Give `model` fake parameters in the types that a forward sees; what each of its units has of its own."""
    types = subject.dtype, subject.master_dtype
    taken: set[nn.Module] = set()
    own: list[list[nn.Module]] = []
    units = units_of(model, repeated_blocks(model))
    needs_cast = set() if plain else cast_by_fsdp(model, *types)
    for unit in units:
        own.append([module for module in unit.modules() if module not in taken])
        taken.update(own[-1])
        casts = any(parameter in needs_cast for _, parameter in _parameters(own[-1]))
        for module, parameter in _parameters(own[-1]):
            is_cast = casts and parameter.is_floating_point()
            seen = DTYPES[subject.dtype] if is_cast else stored_dtype(module, parameter, *types)
            parameter.data = parameter.data.to(seen)
    if "ep" in meshes:
        share_experts(model, meshes["ep"]["ep"])
    if "tp" in meshes:
        share(model, repeated_blocks(model), units, meshes["tp"], subject.plan, meshes.get("ep"), subject.loss_parallel)
    shared = {parameter for experts in shared_experts(model) for parameter in experts.parameters()}
    with fake:
        model.to_empty(device="cpu")
    counted: set[nn.Parameter] = set()
    found = []
    for modules in own:
        sizes = []
        for module, parameter in _parameters(modules):
            if parameter not in counted:
                number = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
                stored = stored_dtype(module, parameter, *types).itemsize
                gathered, trained = 0 if plain else number * parameter.itemsize, number * parameter.requires_grad
                gradients, reduced = trained * parameter.itemsize, 0 if plain else trained * REDUCED
                of_all = stored * (meshes["ep"].size(0) if parameter in shared else 1)
                whole = trained * of_all // stored
                sizes.append(Unit(number * of_all, gathered, whole, gradients, reduced, trained * of_all))
                counted.add(parameter)
        found.append(total(sizes))
    return found


def _parameters(modules: list[nn.Module]) -> list[tuple[nn.Module, nn.Parameter]]:
    return [(module, parameter) for module in modules for parameter in module.parameters(recurse=False)]
