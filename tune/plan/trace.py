"""What a forward and a backward of a process take, block by block, from fake tensors.

A model with one block of each kind (and the first one) stands for the whole: blocks of a kind are alike.
"""

import copy
import itertools
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
    """A model that a recipe shards, shortened, on the meta device. Each kind of blocks has its place in it, and the
    places of all its blocks. `origin` is the recipe's own object."""

    model: nn.Module
    kinds: list[tuple[int, list[int]]]
    dtype: Any
    master_dtype: Any
    compiled: bool
    origin: Callable[[], Any]


class Sharing(NamedTuple):
    """How models are shared by the processes whose meshes (of the axes tp, cp and ep that are used) these are; `plain`
    is whether FSDP neither gathers nor casts those that are trained, and `alone` the frozen ones."""

    meshes: dict[str, DeviceMesh]
    plan: Any = None
    loss_parallel: bool = True
    checkpointing: Any = "none"
    plain: bool = True
    alone: bool = True


class Forward(NamedTuple):
    """A forward without gradients: of which model, and whether it is within a forward of a trained one."""

    number: int
    is_within: bool
    trace: Trace


class StepTrace(NamedTuple):
    """What a micro-batch takes: its forwards and backward, and its forwards without gradients; of each model all units,
    and the root."""

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
    """Counts the bytes of all storages that are alive, and the seconds of operations on `device` by its roofline."""

    def __init__(self, device: Device, dtype: str, fused: bool):
        super().__init__()
        self.device, self.dtype, self.fused = device, dtype, fused
        self.live = self.peak = self.compute = self.products = self.exchange = 0.0
        self.storages: dict[int, Any] = {}
        self.only_fake = False  # what is not fake is on the host
        self.before_next: list[Any] = []  # called when an operation begins: what the one before took has been freed

    def ignore(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage

    def flush(self) -> None:
        """Call what waits for the next operation."""
        while self.before_next:
            self.before_next.pop(0)()

    def mark(self) -> Interval:
        """What is alive, and what has been since the mark before."""
        interval = Interval(self.live, self.peak, self.compute, self.products, self.exchange)
        self.peak, self.compute, self.products, self.exchange = self.live, 0.0, 0.0, 0.0
        return interval

    @property
    def outer(self) -> Interval:
        """What `resume` goes on from."""
        return Interval(self.live, self.peak, self.compute, self.products, self.exchange)

    def resume(self, outer: Interval) -> None:
        """Go on as if nothing had been computed since; what is alive of it stays."""
        self.peak = max(outer.extra, self.live)
        self.compute, self.products, self.exchange = outer[2:]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its own operations come here one by one
        if function is torch.ops.prim.device.default:  # autograd asks this of each tensor; nothing runs
            return args[0].fake_device
        self.flush()
        output = function(*args, **(kwargs or {}))
        outputs = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
        if self.only_fake and not any(isinstance(tensor, FakeTensor) for tensor in outputs):
            return output  # on the host
        for tensor in outputs:
            if tensor.device.type == "meta":  # takes no memory
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
            if "wait" not in name:  # to sum over all is to reduce and to gather
                rounds = 2 if name.endswith(("all_reduce", "allreduce_")) else 1
                boxed = [given for given in args if isinstance(given, torch.ScriptObject)]
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
    first = () if all(parameter.requires_grad for parameter in model.parameters()) else (0,)
    chosen = [next((place for place in places if place not in first), 0) for places in kinds.values()]
    kept = sorted({*first, *chosen})
    try:
        short: Any = copy.deepcopy(model)
    except RuntimeError as error:  # it holds fake tensors, which have no storage that could be copied
        raise TuneError(
            "plan: a second model that transformers computes, such as a reference or a teacher, is not planned"
        ) from error
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
    """Runs what a recipe computes of full rows, with models that take the place of its own."""

    def __init__(self, subjects: Sequence[Subject], sharing: Sharing, device: Device, weights: FakeWeights):
        self.subjects, self.sharing = subjects, sharing
        self.device, self.weights = device, weights
        first = next((subject for subject in subjects if _is_trained(subject.model)), subjects[0])
        self.recorder = Recorder(device, first.dtype, first.compiled)
        self.recorder.only_fake = True
        self.units: list[list[Unit]] = [[] for _ in subjects]
        self.frames: list[_Frame] = []  # the step, and forwards without gradients that are going on
        self.forwards: list[Forward] = []
        self.depth, self.count = 0, 0  # forwards with gradients that are going on, and all so far

    def _prepare(self, number: int, model: nn.Module) -> None:
        """Give a copy of a model fake parameters, and share it as the processes do."""
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
        """The recipe's own models are those of this trace within, and operations are counted."""
        with ExitStack() as stack:
            for number, subject in enumerate(self.subjects):
                model = copy.deepcopy(subject.model)
                if (origin := subject.origin()) is not None:  # before it is shared: functions refer to it then
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
        """`run` computes the loss of a micro-batch; its gradients are computed here. The last of so many `times`."""
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
        """All units of each model."""
        wholes = []
        for subject, units in zip(self.subjects, self.units, strict=True):
            blocks = [units[at] for at, places in subject.kinds for _ in places]
            wholes.append(total([*blocks, *units[len(repeated_blocks(subject.model)) :]]))
        return wholes

    def forward(self, number: int, run: Callable[[Any], Any]) -> Trace:
        """What `run` computes without gradients of the model of this number; of its forwards the last."""
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


Label = tuple[int, int, int | None]  # of which forward, of which model, the place of the block; None: their end


class _Frame:
    """Marks at the beginning of each block, at the end of the last one, and back again."""

    def __init__(self, begin: Interval, outer: Any = None):
        self.begin, self.outer = begin, outer
        self.marks: list[tuple[Label, Interval]] = []
        self.backward: list[tuple[Label, Interval]] = []
        self.end = begin

    def trace(self, subjects: Sequence[Subject], units: list[list[Unit]], first: int = 0) -> Trace:
        """`subjects` and `units` are those of the models from number `first` on. What is between two models counts as
        a block without weights."""
        if not self.marks:
            raise TuneError("plan: no forward of a model that parallelize was given is in a step")
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
    """`origin` is what `model` is, and the other way round, within."""

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
        before, result = recorder.compute, call(tensor, *args, **kwargs)
        recorder.compute = before + device.seconds(0, 2 * tensor.nbytes + tensor.numel(), "")
        return result

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


def _allocated(model: nn.Module, subject: Subject, plain: bool, sharing: Sharing, fake: FakeTensorMode) -> list[Unit]:
    """Give `model` fake parameters in the types that a forward sees; what each of its units has of its own."""
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
