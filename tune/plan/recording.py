"""Record a recipe's own step, to run it repeatedly with full rows and replaced models."""

import copy
import functools
import io
import math
import shutil
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune import rehearsal
from tune.checkpointers import Checkpointer
from tune.collators import Batch
from tune.datasets import GlobalBatch
from tune.devices import Device
from tune.distributed import DTYPES, World, current_world, repeated_blocks
from tune.distributed import require_layout as require_fitting
from tune.errors import TuneError
from tune.generation import Sampler
from tune.plan.trace import Recorder, Subject, kernels, shorten
from tune.rehearsal import MadeUp, RehearsalEnded
from tune.run import Run
from tune.validate import (
    Entered,
    Errors,
    FakeWeights,
    Hooks,
    NotRehearsed,
    NotSaved,
    ReadNumbers,
    Recipe,
    RehearsedCheckpointer,
    RehearsedRun,
    RehearsedWorld,
    Uninitialized,
    is_limit,
    process_group,
    rehearsed,
)

FEW = 2  # rows of the first step, which only records its parts
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def ignore(*_: Any) -> None:
    pass


class Reached(RehearsalEnded):
    """Carries a loss at its backward, where a traced step ends."""

    def __init__(self, loss: Tensor):
        self.loss = loss


class UntilBackward(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.backward:
            raise Reached(args[0])
        return function(*args, **(kwargs or {}))


class Steps:
    """The iterator of `Run.steps`; the loop over it is the recipe's step."""

    def __init__(self, data: Any, world: World, reached: Callable[["Steps"], None]):
        self.data, self.world, self.reached = data, world, reached
        self.item: Any = None
        self.place = 1, object()  # takes the place of an item until the loop is known

    def __iter__(self) -> "Steps":
        return self

    def __next__(self) -> Any:
        self.reached(self)
        return self.place

    def draw(self) -> Any:
        """Return a step's number and its rows; can be called repeatedly."""
        data = self.data if isinstance(self.data, Iterator) else copy.copy(self.data)
        self.item = next(iter(data), self.item)
        return self.item


class Loop(Hooks):
    """The recipe's loop over its steps, in any function of its file. `step` runs the loop's body for an item."""

    step: Callable[[Any], None]

    def __init__(self, recipe: Recipe, report: Callable[[BaseException, bool], None]):
        super().__init__(str(recipe.file), recipe.tree, report)
        self.steps: Steps | None = None
        self.depth = 0  # of loops of the recipe that draw an item now
        self.held = list[Any]()  # keeps alive what the recipe holds during a step

    def entered(self, number: int) -> Entered:
        return FilesOpen(self, number, self.contexts.pop(number))

    def loop(self, items: Any, body: types.FunctionType) -> Iterator[Any]:
        """Called by each loop of the recipe; returns the items to iterate over."""
        if self.steps:  # known already
            return iter(items)
        return self._watched(iter(items), body, sys._getframe(1))

    def _watched(self, items: Iterator[Any], body: types.FunctionType, frame: types.FrameType | None) -> Iterator[Any]:
        """Yield the items, until one is drawn from `Steps`, perhaps by `enumerate`, `zip` or tqdm."""
        while True:
            self.depth += 1
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.depth -= 1
            if steps := self.steps:
                break
            yield item
        while frame:
            if frame.f_code.co_filename == body.__code__.co_filename:
                self.held += frame.f_locals.values()
            frame = frame.f_back
        self.step = lambda new: body(replaced(item, steps.place, new))
        raise RehearsalEnded

    def reach(self, steps: Steps) -> None:
        """Called when the recipe draws a step."""
        if not self.depth:
            raise TuneError("plan: loop over the steps by `for step, batch in run.steps(...)`, in the recipe's file")
        self.steps = steps


class FilesOpen(Entered):
    """Leaves files open when the loop over the steps is found, because its body runs later."""

    def __exit__(self, *error: Any) -> Any:
        is_found = isinstance(error[1], RehearsalEnded)
        if is_found and isinstance(self.manager, io.IOBase):
            return None
        if is_found and isinstance(self.manager, ExitStack):
            self.manager.pop_all()
        return super().__exit__(*error)


def replaced(item: Any, place: tuple[int, Any], new: tuple[int, Any]) -> Any:
    """Return an item of a loop with `new` in place of `place`, also within tuples."""
    if item is place:
        return new
    if item is place[1]:
        return new[1]
    return tuple(replaced(part, place, new) for part in item) if type(item) is tuple else item


class PlannedWorld(RehearsedWorld):
    """The World of one process, which its process group may not outlast."""

    rank, size, data_rank, data_size, is_main, num_stages, is_last_stage = 0, 1, 0, 1, True, 1, True


class PlannedRun(RehearsedRun):
    """A `Run` without a folder or reports."""

    def _open_folder(self, chosen: str, resume: str) -> None:
        self.store, self.again, self.resume = None, "", "never"
        self.path = Path(mkdtemp(prefix="tune-plan-"))  # for files that the recipe itself writes
        self._rehearsal.folders[self.path] = self.path
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def describe_rollouts(self, *_: Any) -> None:
        pass

    def info(self, message: str) -> None:
        pass

    def steps(self, data: Any, checkpointer: Any = None, *_: Any, total: int | None = None, **__: Any) -> Any:
        self.step, self.total = 1, total or rehearsal.UNKNOWN
        planning = rehearsal.planning()
        assert isinstance(planning, Recording)
        planning.checkpointer = checkpointer
        return Steps(data, self.world, planning.loop.reach)

    def __exit__(self, *_: object) -> None:
        pass


class PlannedCheckpointer(RehearsedCheckpointer):
    """A `Checkpointer` that finds no checkpoint."""

    def resume(self, resume: Any = "auto") -> int:
        return 0


@dataclass
class Sampling:
    """Completions that a step samples, one for each of `prompts`, of which `different` are distinct."""

    sampler: Sampler
    number: int  # of the model
    prompts: int
    different: int
    longest: int  # tokens of a prompt


@dataclass
class LoneForward:
    """A forward without gradients before the first step, or one that scores a step's samples (`in_step`).

    It has the model, the batch, and whether the trained models already have weights.
    """

    number: int
    call: Callable[[Any, Any], Any]
    batch: Any
    is_beside: bool
    in_step: bool


@contextmanager
def fake_group() -> Iterator[Callable[[int], None]]:
    """Like `process_group`, but ends the group of an earlier plan."""
    if dist.is_initialized() and dist.get_backend() == "fake":
        dist.destroy_process_group()
        meshes_of.cache_clear()
    with process_group(0) as start:
        yield start


@functools.cache
def meshes_of(tp: int, cp: int, ep: int) -> dict[str, DeviceMesh]:
    """Return meshes for the axes that are used, of fake processes."""
    grids = {("tp",): (tp,), ("cp", "tp"): (cp, tp), ("ep", "tp"): (ep, tp)}
    used = {names: torch.arange(math.prod(grid)).view(grid) for names, grid in grids.items() if grid[0] > 1}
    if used and not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4096)
    return {names[0]: DeviceMesh("cpu", ranks, mesh_dim_names=names) for names, ranks in used.items()}


class Recording:
    """The recipe in `file` with the settings `cfg`, run through its first step.

    Raises:
        TuneError: the recipe raises it, or cannot be planned.
    """

    def __init__(self, file: Path, cfg: DictConfig, device: Device):
        self.device, self.device_type = device, "cpu" if device.is_host else "cuda"
        self.recipe, self.weights = Recipe(file), FakeWeights()
        self.rows: int | None = None  # of the traced micro-batch; None: the recipe's number
        self.axes: dict[str, Any] = {}
        self.models: list[nn.Module] = []  # before sharding, on the meta device
        self.how: list[dict[str, Any]] = []
        self.subjects: list[Subject] = []
        self.samplings: list[Sampling] = []
        self.lone_forwards: list[LoneForward] = []
        self.forwards: Counter[int] = Counter()  # without gradients in the first step, by model
        self.checkpointer: Checkpointer | None = None
        self.global_batch_size = self.micro_batch_size = self.first_rows = 0
        self.max_steps: int | None = None
        self.batch: Batch | None = None
        self.optimizer_states: dict[nn.Parameter, float] = {}  # bytes
        self.updates = 1
        self.is_in_step = self.is_scoring = False
        self.depth = self.items = 0
        self.saved = NotSaved()
        self.loop = Loop(self.recipe, Errors(self.weights, self.saved, self._report))
        with fake_group() as start, Uninitialized(), ReadNumbers(self.weights), self._rehearsed():
            start(1)
            with closing(self.weights):
                self._call(cfg)
            if self.loop.steps is None:
                raise TuneError(f"plan: {file} has no loop over run.steps, and tune plan only plans training")
            self.steps = self.loop.steps
            self._first_step()
        self.stays = [subject.origin() is not None for subject in self.subjects]

    # Callbacks of the library, see `tune.rehearsal.Planning`.

    def take_axes(self, axes: Mapping[str, Any]) -> bool:
        self.axes = {**axes}
        return True

    def take_model(self, model: Any, how: Mapping[str, Any]) -> None:
        has_float8 = any("Float8" in type(module).__name__ for module in model.modules())
        if has_float8 and not (self.device.is_host or self.device.float8):
            raise TuneError(f"model.float8: {self.device.name} does not support float8 products. Leave it out")
        self.models.append(copy.copy(model))
        dtype, master_dtype = (NAMES.get(how[name], how[name]) for name in ("dtype", "master_dtype"))
        self.how.append({**how, "dtype": dtype, "master_dtype": master_dtype})
        short, kinds = shorten(model)
        number = len(self.subjects)
        self.subjects.append(Subject(short, kinds, dtype, master_dtype, bool(how["compile"]), weakref.ref(model)))
        other = copy.deepcopy(short)
        for name in ("__dict__", "__class__"):
            object.__setattr__(model, name, getattr(other, name))
        here = weakref.ref(model)
        model.register_forward_pre_hook(
            lambda _, args, kwargs: self._forward(number, here(), args, kwargs), with_kwargs=True
        )
        model.register_forward_pre_hook(lambda *_: self._enter(1))
        model.register_forward_hook(lambda *_: self._enter(-1))

    def take_rows(self, rows: int, micro_batch_size: int, max_steps: int | None = None) -> int:
        if self.rows is not None:
            return self.rows
        self.global_batch_size, self.micro_batch_size = rows, micro_batch_size
        self.max_steps = max_steps or self.max_steps
        self.first_rows = min(micro_batch_size, FEW)
        return self.first_rows

    def take_sampling(self, sampler: Sampler, model: Any, prompts: list[Any]) -> None:
        if self.rows is None and prompts:
            if type(sampler).complete is not Sampler.complete:
                raise TuneError("plan: tune plan only supports tune.generation.Sampler. Leave sampling._component_ out")
            known = [number for number, subject in enumerate(self.subjects) if subject.origin() is model]
            number = known[0] if known else 0  # a transformers model is wrapped
            longest = max(map(len, prompts))
            different = len({*prompts}) if self.items else len(prompts)  # full rows are identical
            self.samplings.append(Sampling(sampler, number, len(prompts), different, longest))

    @contextmanager
    def scoring(self) -> Iterator[bool]:
        self.is_scoring = True
        yield self.rows is None
        self.is_scoring = False

    # The first step.

    def _call(self, cfg: DictConfig) -> None:
        with self._explained():
            self.recipe.call_with_bodies(cfg, self.loop)

    def _report(self, error: Exception) -> None:
        """Raise an error of the recipe, and go on after one of the rehearsal."""
        if not (isinstance(error, NotRehearsed) or is_limit(error)):
            raise self.recipe.explained(error) from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise an error of the recipe as a TuneError with its line."""
        self.weights.asked.clear()  # a plan runs the same lines many times
        try:
            yield
        except (Exception, MadeUp) as error:
            raise self.recipe.explained(error) from error

    def _step(self, item: Any) -> None:
        with self._explained():
            self.loop.step(item)

    @contextmanager
    def _rehearsed(
        self, report: Callable[[Any], None] = ignore, start: Callable[[int], None] = ignore, world: Any = PlannedWorld
    ) -> Iterator[None]:
        note = rehearsal.Rehearsal(
            report, ignore, None, self.weights.made, start,
            {World: world, Run: PlannedRun, Checkpointer: PlannedCheckpointer}, {"plan"}, planning=self,
        )  # fmt: skip
        with rehearsed(note, self.recipe.file, self.saved):
            yield

    def _enter(self, change: int) -> None:
        """Make all tensors fake within forwards."""
        self.depth += change
        self.weights.is_total = self.depth > 0

    def _forward(self, number: int, model: Any, args: Any, kwargs: Any) -> None:
        """Record a forward of the first step, or one before it."""
        if torch.is_grad_enabled() and is_trained(model):
            self.batch = args[0] if isinstance(args[0], Batch) else self.batch
            return
        if self.is_in_step and not self.is_scoring:
            self.forwards[number] += 1
            return

        def call(model: Any, batch: Any) -> Any:
            return model(batch, *args[1:], **kwargs)

        others = [subject for subject in self.subjects if subject.origin() is not model]
        is_beside = any(is_trained(other.model) for other in others)
        if not any(forward.number == number for forward in self.lone_forwards):
            self.lone_forwards.append(LoneForward(number, call, args[0], is_beside, self.is_in_step))

    def _first_step(self) -> None:
        def stepped(optimizer: Any, *_: Any) -> None:
            updated[id(optimizer)] += 1
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    states = optimizer.state.get(parameter, {}).values()
                    tensors = [state for state in states if isinstance(state, Tensor)]
                    self.optimizer_states[parameter] = sum(map(_size, tensors))

        updated: Counter[int] = Counter()
        recorder = Recorder(self.device, self.subjects[0].dtype if self.subjects else "fp32", False)
        self.is_in_step = True
        self.max_steps = getattr(self.steps.data, "max_steps", None)
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_post_hook(stepped).remove)
            stack.enter_context(self.weights)
            stack.enter_context(kernels(self.device, recorder, "none"))
            item = self.steps.draw()
            self.items = len(item[1]) if isinstance(item[1], list) else 0
            with suppress(RehearsalEnded):
                self._step(item)
        self.weights.is_total = False
        self.updates = max(updated.values(), default=1)
        self.states = [self._states_of(number) for number in range(len(self.subjects))]

    def _states_of(self, number: int) -> float:
        """Return the bytes of the optimizer's states for a model with all of its blocks."""
        model, subject = self.subjects[number].origin(), self.subjects[number]
        if model is None:
            return 0.0
        blocks = repeated_blocks(model)
        within = {parameter for block in blocks for parameter in block.parameters()}

        def size(parameters: Iterable[nn.Parameter]) -> float:
            return sum(self.optimizer_states.get(parameter, 0.0) for parameter in parameters)

        others = size(parameter for parameter in model.parameters() if parameter not in within)
        return others + sum(len(places) * size(blocks[at].parameters()) for at, places in subject.kinds)

    # Traced steps.

    def batch_of(self, forward: LoneForward, rows: int) -> Any:
        """Return the batch of a forward: before the first step, `rows` full rows like the recipe's data."""
        if forward.in_step:
            return forward.batch
        with self._rehearsed():
            _, drawn = self._item(rows)
        return drawn.micro_batches[0] if isinstance(drawn, GlobalBatch) else forward.batch

    def _item(self, rows: int) -> Any:
        self.rows = rows
        step, drawn = self.steps.draw()
        if isinstance(drawn, list) and self.samplings:
            samples = self.samplings[0].prompts / len(drawn)  # per prompt
            drawn = [drawn[at % len(drawn)] for at in range(math.ceil(rows / samples))]
        return step, drawn

    def loss(self, rows: int) -> Tensor:
        """Return the loss of a micro-batch of `rows` rows, by the recipe's own lines."""
        item = self._item(rows)
        try:
            with UntilBackward(), torch.enable_grad():
                self._step(item)
        except Reached as reached:
            return reached.loss
        raise TuneError("plan: a step of the recipe does not call loss.backward()")

    @contextmanager
    def replayed(self) -> Iterator[None]:
        with self._rehearsed():
            yield


class LayoutOnly(Recording):
    """A recipe that runs in its layout until it shards a model."""

    def __init__(self, recipe: Recipe, cfg: DictConfig, processes: int):
        self.recipe, self.weights, self.rows, self.device_type = recipe, FakeWeights(), None, "cpu"
        self.saved, numbers = NotSaved(), ReadNumbers(self.weights)
        with fake_group() as start, Uninitialized(), numbers, self._rehearsed(self._raise, start, RehearsedWorld):
            start(processes)
            self.loop = Loop(recipe, Errors(self.weights, self.saved, self._report))
            self._call(cfg)

    def _raise(self, error: Exception) -> None:
        raise error

    def take_axes(self, axes: Mapping[str, Any]) -> bool:
        return False

    def take_model(self, model: Any, how: Mapping[str, Any]) -> None:
        require_fitting(model, current_world(), how["dtype"], how["master_dtype"])
        raise RehearsalEnded


def require_layout(file: Path, cfg: DictConfig, processes: int) -> None:
    """Run the recipe in `file` until it shards a model. Raises the recipe's TuneError.

    A process that is one of several already has its layout.
    """
    if dist.is_initialized() and dist.get_backend() != "fake":
        return
    LayoutOnly(Recipe(file), cfg, processes)


def is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _size(tensor: Any) -> int:
    """Return the bytes of a tensor; for a subclass, the bytes of its inner tensors."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not Tensor:
        with suppress(TypeError):
            return sum(_size(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.itemsize)
