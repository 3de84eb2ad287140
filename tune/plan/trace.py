"""Trace memory and time of a process's forward and backward, block by block, on fake tensors.

A model with one block of each kind (and the first block) stands for the whole model, because blocks of a kind are
equal.
"""

import copy
import itertools
import re
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from tune import fused
from tune.devices import Device
from tune.distributed import (
    Stage,
    as_dtype,
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
from tune.errors import TuneError
from tune.losses import chunks
from tune.models import attention, flash, layers
from tune.peft import products
from tune.quantization import nf4
from tune.validate import FakeWeights

REDUCED = 4  # bytes of a gradient while FSDP reduces it: fp32
FREE = ("empty", "detach", "lift", "alias", "_unsafe_view")  # operations that touch no elements
# These touch only as many elements of their first argument as they return or write.
INDEX = ("embedding", "gather", "index", "index_select", "index_put_", "scatter_", "scatter_add_", "index_add_")

GROUPS = ("group_name", "process_group")  # arguments of operations that exchange
ALL_REDUCE = re.compile("all_?reduce")


class Interval(NamedTuple):
    """The interval between two marks: live bytes added at its end and at its peak, and its seconds."""

    live: float = 0.0
    extra: float = 0.0
    compute: float = 0.0
    products: float = 0.0  # seconds of matrix products without the memory limit
    exchange: float = 0.0  # seconds of blocking collectives, such as tensor parallelism's


class Unit(NamedTuple):
    """A unit that FSDP gathers at one time, for one process of a tensor-parallel group.

    Unsharded: bytes as gathered, and bytes of the trained parameters' gradients, in the type of computation and in the
    type of the reduction. Sharded by FSDP: bytes as stored, and of the trained parameters the number and bytes as
    stored. These count all experts, of which the process gathers a share.
    """

    stored: float = 0.0
    gathered: float = 0.0
    trained: float = 0.0
    gradients: float = 0.0
    reduced: float = 0.0
    master: float = 0.0


def total(units: Iterable[Unit]) -> Unit:
    """Return the sum of units."""
    return Unit(*(sum(sizes) for sizes in zip(Unit(), *units, strict=True)))


class Alike(NamedTuple):
    """Blocks of one kind: their number, and the cost of one block."""

    number: int
    unit: Unit
    forward: Interval
    backward: Interval


class Trace(NamedTuple):
    """The trace of a step, in order. `rest` is the embedding's backward; `others` are other units, root last."""

    embed: Interval
    blocks: list[Alike]
    loss: Interval
    rest: Interval
    others: list[Unit]

    @property
    def whole(self) -> Unit:
        """The sum of all units of a process."""
        return total([*(kind.unit for kind in self.blocks for _ in range(kind.number)), *self.others])

    @property
    def saved(self) -> float:
        """Bytes that all blocks save for backward."""
        return sum(kind.number * kind.forward.live for kind in self.blocks)

    def stage(self, numbers: list[int], is_first: bool, is_last: bool) -> "Trace":
        """Return the trace of a pipeline stage with these numbers of blocks of each kind.

        The first stage has the embedding, the last one the head, and both have a tied weight.
        """
        *embeddings, root = self.others
        kept = [kind._replace(number=number) for kind, number in zip(self.blocks, numbers, strict=True) if number]
        others = [*(embeddings if is_first else ()), root if is_last or (is_first and not embeddings) else Unit()]
        embed, loss, rest = self.embed, self.loss, self.rest
        if not is_first:  # its input is as large as the embedded tokens
            embed, rest = Interval(embed.live, embed.live), Interval()
        return Trace(embed, kept, loss if is_last else Interval(), rest, others)

    def scaled(self, two: "Trace", rows: int) -> "Trace":
        """Extrapolate linearly to `rows` from this trace of one row and a trace of two rows."""
        return tree_map(lambda one, other: one + (rows - 1) * (other - one), self, two)


class Subject(NamedTuple):
    """A shortened copy, on the meta device, of a model that a recipe shards.

    Each kind of blocks has its place in the copy, and the places of all its blocks. `origin` is the recipe's object.
    """

    model: nn.Module
    kinds: list[tuple[int, list[int]]]
    dtype: Any
    master_dtype: Any
    compiled: bool
    origin: Callable[[], Any]


class Sharing(NamedTuple):
    """How processes share models, by the meshes of the used axes tp, cp and ep.

    With `plain`, FSDP neither gathers nor casts trained models; with `alone`, the same holds for frozen models.
    """

    meshes: dict[str, DeviceMesh]
    plan: Any = None
    loss_parallel: bool = True
    checkpointing: Any = "none"
    plain: bool = True
    alone: bool = True


class Forward(NamedTuple):
    """A forward without gradients: its model, and whether it runs within a trained model's forward."""

    number: int
    is_within: bool
    trace: Trace


class StepTrace(NamedTuple):
    """The trace of a micro-batch: its forwards and backward, its forwards without gradients, and each model's units and
    root."""

    trained: Trace
    forwards: list[Forward]
    wholes: list[Unit]
    roots: list[Unit]

    def scaled(self, two: "StepTrace", rows: int) -> "StepTrace":
        """See `Trace.scaled`."""
        forwards = [
            one._replace(trace=one.trace.scaled(other.trace, rows))
            for one, other in zip(self.forwards, two.forwards, strict=True)
        ]
        return self._replace(trained=self.trained.scaled(two.trained, rows), forwards=forwards)


class Recorder(TorchDispatchMode):
    """Counts the bytes of live storages, and the seconds of operations on `device` by its roofline."""

    def __init__(self, device: Device, dtype: str, fused: bool):
        super().__init__()
        self.device, self.dtype, self.fused = device, dtype, fused
        self.live = self.peak = self.compute = self.products = self.exchange = 0.0
        self.storages: dict[int, Any] = {}
        self.only_fake = False  # tensors that are not fake are on the host
        self.before_next: list[Any] = []  # called when the next operation begins, after temporaries were freed

    def ignore(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage

    def flush(self) -> None:
        """Call the functions that wait for the next operation."""
        while self.before_next:
            self.before_next.pop(0)()

    def mark(self) -> Interval:
        """Record the live bytes, and the interval since the last mark."""
        interval = Interval(self.live, self.peak, self.compute, self.products, self.exchange)
        self.peak, self.compute, self.products, self.exchange = self.live, 0.0, 0.0, 0.0
        return interval

    @property
    def outer(self) -> Interval:
        """Return the state for `resume`."""
        return Interval(self.live, self.peak, self.compute, self.products, self.exchange)

    def resume(self, outer: Interval) -> None:
        """Restore the state as if nothing had been computed since; live bytes stay."""
        self.peak = max(outer.extra, self.live)
        self.compute, self.products, self.exchange = outer[2:]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its inner operations arrive one by one
        if function is torch.ops.prim.device.default:  # autograd asks this for each tensor; nothing runs
            return args[0].fake_device
        self.flush()
        output = function(*args, **(kwargs or {}))
        outputs = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
        if self.only_fake and not any(isinstance(tensor, FakeTensor) for tensor in outputs):
            return output  # on the host
        for tensor in outputs:
            if tensor.device.type == "meta":  # uses no memory
                continue
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
        # `out=` is not read.
        tensors = [tensor for tensor in (*tree_leaves(args), *outputs) if isinstance(tensor, Tensor)]
        plain = name.removeprefix("aten::")
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors if plain not in INDEX or tensor is not args[0]]
        moved: float = sum(sizes) * (1 + (plain in INDEX))
        if name.startswith(("_c10d_functional::", "c10d::")):
            given = zip(function._schema.arguments, args, strict=False)  # arguments with defaults may be left out
            groups = [value for argument, value in given if argument.name in GROUPS]
            if groups:  # other operations wait for an exchange or wrap its result
                rounds = 2 if ALL_REDUCE.search(name) else 1  # a reduce plus a gather
                is_boxed = isinstance(groups[0], torch.ScriptObject)
                group = dist.ProcessGroup.unbox(groups[0]) if is_boxed else _resolve_process_group(groups[0])
                ranks = dist.get_process_group_ranks(group)
                self.exchange += self.device.transfer(rounds * max(sizes), len(ranks), max(ranks) - min(ranks) + 1)
            return
        attends = "attention" in name or "varlen_attn" in name
        flops = _flops(function, name, attends, args, kwargs, output)
        if self.fused and not flops:
            moved /= 3  # a compiler fuses consecutive operations into one read and write
        dtype = "fp8" if name == "aten::_scaled_mm" else self.dtype
        self.compute += self.device.seconds(flops, moved, dtype, attends)
        self.products += self.device.seconds(flops, 0, dtype, attends) if flops else 0


def _flops(function: Any, name: str, attends: bool, args: Any, kwargs: Any, output: Any) -> float:
    if attends:
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        longest = key.shape[-2] if query.dim() == 4 else min(len(key), args[9 if backward else 6])
        # Two products, five in backward; half of each, because attention is causal.
        return (5 if backward else 2) * query.numel() * longest
    if name.startswith(("tune::product_by_group", "aten::_grouped_mm")):
        return 2.0 * args[0].numel() * output.shape[-1]
    known = flop_registry.get(torch.ops.aten.addmm if name == "aten::addmm_" else function.overloadpacket)
    return float(known(*args, **kwargs, out_val=output)) if known else 0.0


def shorten(model: nn.Module) -> tuple[nn.Module, list[tuple[int, list[int]]]]:
    """Return a copy of `model` on the meta device with one block of each kind, and the places of each kind's blocks.

    If not everything is trained, the copy also has the first block, below which there may be no backward. For each
    kind, the result has the place of its block in the copy, and the places of all its blocks in the model. Blocks of
    a kind have parameters of the same shapes, types and settings.
    """
    layers = getattr(getattr(model, "config", None), "layers", None)
    kinds: dict[Any, list[int]] = defaultdict(list)
    for index, block in enumerate(repeated_blocks(model)):
        parameters = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())
        kinds[parameters, layers[index] if layers else getattr(block, "attention_type", type(block))].append(index)
    first = () if all(parameter.requires_grad for parameter in model.parameters()) else (0,)
    chosen = [next((place for place in places if place not in first), 0) for places in kinds.values()]
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


class Tracer:
    """Runs a recipe's computation on full rows, with replaced models."""

    def __init__(self, subjects: Sequence[Subject], sharing: Sharing, device: Device, weights: FakeWeights):
        self.subjects, self.sharing = subjects, sharing
        self.device, self.weights = device, weights
        first = next((subject for subject in subjects if _is_trained(subject.model)), subjects[0])
        self.recorder = Recorder(device, first.dtype, first.compiled)
        self.recorder.only_fake = True
        self.units: list[list[Unit]] = [[] for _ in subjects]
        self.frames: list[_Frame] = []  # the step, and running forwards without gradients
        self.forwards: list[Forward] = []
        self.depth, self.count = 0, 0  # running forwards with gradients, and all so far

    def _prepare(self, number: int, model: nn.Module) -> None:
        """Give a copy of a model fake parameters, and shard it as the processes do."""
        sharing = self.sharing
        is_plain = sharing.plain if _is_trained(model) else sharing.alone
        self.units[number] = _allocated(model, self.subjects[number], is_plain, sharing, self.weights.fake)
        if "cp" in sharing.meshes:
            split(model, sharing.meshes["cp"]["cp"])
        for block in repeated_blocks(model):
            wrap_forward(block, sharing.checkpointing, False, False)
        for tensor in (*model.parameters(), *model.buffers()):
            self.recorder.ignore(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the recipe's models by the traced ones in this context, and count operations."""
        with ExitStack() as stack:
            for number, subject in enumerate(self.subjects):
                model = copy.deepcopy(subject.model)
                if (origin := subject.origin()) is not None:  # before sharding, because functions refer to it
                    stack.enter_context(_exchanged(origin, model))
                    model = origin
                self._prepare(number, model)
                for handle in self._watch(number, model):
                    stack.callback(handle.remove)
            stack.enter_context(self.weights)
            stack.enter_context(kernels(self.device, self.recorder, self.sharing.checkpointing))
            stack.enter_context(self.recorder)
            yield

    def step(self, run: Callable[[], Tensor], times: int = 1) -> StepTrace:
        """Trace the forward and backward of `times` micro-batches, whose loss `run` computes; return the last."""
        with self.in_place():
            for _ in range(times):
                self.forwards, self.count = [], 0
                frame = _Frame(self.recorder.mark())
                self.frames = [frame]
                loss = run()
                loss.backward()
                self.recorder.flush()
                frame.end = self.recorder.mark()
                del loss
        trained, roots = frame.trace(self.subjects, self.units), [units[-1] for units in self.units]
        return StepTrace(trained, self.forwards, self.wholes(), roots)

    def wholes(self) -> list[Unit]:
        """Return all units of each model."""
        wholes = []
        for subject, units in zip(self.subjects, self.units, strict=True):
            blocks = [units[at] for at, places in subject.kinds for _ in places]
            wholes.append(total([*blocks, *units[len(repeated_blocks(subject.model)) :]]))
        return wholes

    def forward(self, number: int, run: Callable[[Any], Any]) -> Trace:
        """Trace what `run` computes without gradients with model `number`; of its forwards, the last one."""
        subject = self.subjects[number]
        model = copy.deepcopy(subject.model)
        self._prepare(number, model)
        frame = _Frame(self.recorder.mark())
        with self.weights.fake, kernels(self.device, self.recorder, "none"), self.recorder, torch.no_grad():
            self.frames = [frame]
            handles = self._watch_blocks(number, model)
            result = run(model)
            self.recorder.flush()
            frame.end = self.recorder.mark()
            for handle in handles:
                handle.remove()
            del result
        blocks = len(repeated_blocks(model)) + 1
        frame.marks = frame.marks[-blocks:]
        return frame.trace([subject], [self.units[number]], number)

    def _watch(self, number: int, model: nn.Module) -> list[Any]:
        recorder = self.recorder

        def before(*_: Any) -> None:
            recorder.flush()
            self.weights.is_total = True
            if torch.is_grad_enabled() and _is_trained(model):
                self.depth, self.count = self.depth + 1, self.count + 1
                return
            outer = recorder.outer
            self.frames.append(_Frame(recorder.mark(), outer))

        def after(*_: Any) -> None:
            recorder.flush()
            if torch.is_grad_enabled() and _is_trained(model):
                self.depth -= 1
            else:
                frame = self.frames.pop()
                frame.end = recorder.mark()
                trace = frame.trace([self.subjects[number]], [self.units[number]], number)
                self.forwards.append(Forward(number, self.depth > 0, trace))
                recorder.resume(frame.outer)
            self.weights.is_total = self.depth > 0 or len(self.frames) > 1

        handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
        return handles + self._watch_blocks(number, model)

    def _watch_blocks(self, number: int, model: nn.Module) -> list[Any]:
        def at(place: int | None, tensors: Any) -> None:
            frame, label = self.frames[-1], (self.count, number, place)
            tensor = next(leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
            if tensor.requires_grad:
                tensor.register_hook(lambda _: frame.backward.append((label, self.recorder.mark())))
            self.recorder.before_next.append(lambda: frame.marks.append((label, self.recorder.mark())))

        blocks = repeated_blocks(model)

        def before(place: int) -> Callable[..., None]:
            return lambda _, args, kwargs: at(place, (args, kwargs))

        handles: list[Any] = [
            block.register_forward_pre_hook(before(place), with_kwargs=True) for place, block in enumerate(blocks)
        ]
        return [*handles, blocks[-1].register_forward_hook(lambda _, args, output: at(None, output))]


Label = tuple[int, int, int | None]  # forward, model, place of the block (None: the end)


class _Frame:
    """Marks at the start of each block and the end of the last one, in forward and backward."""

    def __init__(self, begin: Interval, outer: Any = None):
        self.begin, self.outer = begin, outer
        self.marks: list[tuple[Label, Interval]] = []
        self.backward: list[tuple[Label, Interval]] = []
        self.end = begin

    def trace(self, subjects: Sequence[Subject], units: list[list[Unit]], first: int = 0) -> Trace:
        """Return the trace. `subjects` and `units` start at model number `first`. Computation between two models counts
        as a block without weights."""
        if not self.marks:
            raise TuneError("plan: a step runs no forward of a model that was given to parallelize")
        labels = [label for label, _ in self.marks]
        marks = [self.begin, *(mark for _, mark in self.marks)]
        behind = self.backward[0][1] if self.backward else self.end
        embed, *forward = [_between(*pair) for pair in itertools.pairwise([*marks, behind])]
        loss, backward = forward.pop(), dict[Label, Interval]()
        for (_, before), (label, after) in itertools.pairwise(self.backward):
            backward[label] = _between(before, after)
        rest = _between(self.backward[-1][1], self.end) if self.backward else Interval()
        kinds, others, roots, known = [], [], [], set[int]()
        steps = dict(zip(labels, forward, strict=False))
        for count, number, _ in dict.fromkeys((count, number, 0) for count, number, _ in labels):
            subject, own = subjects[number - first], units[number - first]
            is_again = number in known
            known.add(number)
            for at, places in subject.kinds:
                label = (count, number, at)
                unit = Unit() if is_again else own[at]
                kinds.append(Alike(len(places), unit, steps[label], backward.get(label, Interval())))
            if (end := (count, number, None)) in steps:
                kinds.append(Alike(1, Unit(), steps[end], backward.get(end, Interval())))
            if not is_again:
                *embeddings, root = own[len(repeated_blocks(subject.model)) :]
                others += embeddings
                roots.append(root)
        return Trace(embed, kinds, loss, rest, [*others, total(roots)])


def _between(a: Interval, b: Interval) -> Interval:
    return Interval(b.live - a.live, b.extra - a.live, *b[2:])


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


@contextmanager
def _exchanged(origin: nn.Module, model: nn.Module) -> Iterator[None]:
    """Exchange the contents of `origin` and `model` in this context."""

    def exchange() -> None:
        mine, others = (vars(origin), type(origin)), (vars(model), type(model))
        for module, (names, kind) in ((origin, others), (model, mine)):
            object.__setattr__(module, "__dict__", names)
            object.__setattr__(module, "__class__", kind)

    exchange()
    try:
        yield
    finally:
        exchange()


@contextmanager
def kernels(device: Device, recorder: Recorder, checkpointing: Any) -> Iterator[None]:
    """Replace kernels to match the device in this context.

    Attention, adapters and chunks of logits run as on the device. One kernel dequantizes 4-bit weights. A compiler
    reads tensors twice that it casts to 8 bits. Experts get equally many tokens from each process.
    """
    chunk_tokens, kind = chunks.default_chunk_tokens, "cpu" if device.is_host else "cuda"

    def launch(programs: str, name: str, grid: Any, *arguments: Any, **options: Any) -> None:
        moved = sum(argument.nbytes for argument in arguments if isinstance(argument, Tensor))
        recorder.compute += device.seconds(0, moved, "")

    def whole(codes: Tensor, scales: Tensor, ranges: Any, dtype: torch.dtype, pairs: Any = None) -> Tensor:
        weight = torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device)
        recorder.compute += device.seconds(0, codes.nbytes + scales.nbytes + weight.nbytes, "")
        return weight

    def cast(call: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        before, result = recorder.compute, call(tensor, *args, **kwargs)
        recorder.compute = before + device.seconds(0, 2 * tensor.nbytes + tensor.numel(), "")
        return result

    def choose(*args: Any, **scoring: Any) -> attention.Choice:
        taken = of_device(*args, **scoring)
        return attention.Choice("flash") if taken.path == "flex" else taken  # it keeps as much

    of_device = attention.choose
    # Imported only with its layers.
    linears = sys.modules.get("torchao.float8.float8_linear") if recorder.fused else None
    name = "hp_tensor_to_float8_dynamic"
    with (
        mock.patch.object(linears, name, partial(cast, getattr(linears, name))) if linears else nullcontext(),
        mock.patch.object(attention, "capability", lambda _: device.attends_as),
        mock.patch.object(attention, "choose", choose),
        mock.patch.object(attention, "efficient", flash.flash),  # keeps as much, and torch can plan its backward
        mock.patch.object(layers, "choose", choose),
        mock.patch.object(nf4, "dequantize", whole),
        mock.patch.object(products, "dequantize", whole),
        mock.patch.object(fused, "fits", lambda *_: device.capability is not None and not recorder.fused),
        mock.patch.object(fused, "launch", launch),
        mock.patch.object(products, "is_watched", lambda: checkpointing == "selective"),
        mock.patch.object(chunks, "default_chunk_tokens", lambda vocab, _: chunk_tokens(vocab, kind)),
    ):
        yield


def _allocated(model: nn.Module, subject: Subject, plain: bool, sharing: Sharing, fake: FakeTensorMode) -> list[Unit]:
    """Give `model` fake parameters in the types that a forward sees. Return its units."""
    types, meshes = (subject.dtype, subject.master_dtype), sharing.meshes
    plan = sharing.plan if _is_trained(model) else None
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
            seen = as_dtype(subject.dtype) if is_cast else stored_dtype(module, parameter, *types)
            parameter.data = parameter.data.to(seen)
    if "ep" in meshes:
        share_experts(model, meshes["ep"]["ep"])
    if "tp" in meshes:
        share(model, repeated_blocks(model), units, meshes["tp"], plan, meshes.get("ep"), sharing.loss_parallel)
    shared = {parameter for experts in shared_experts(model) for parameter in experts.parameters()}
    with fake:
        model.to_empty(device="cpu")
    counted: set[nn.Parameter] = set()
    units_of_model = []
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
        units_of_model.append(total(sizes))
    return units_of_model


def _parameters(modules: list[nn.Module]) -> list[tuple[nn.Module, nn.Parameter]]:
    return [(module, parameter) for module in modules for parameter in module.parameters(recurse=False)]
