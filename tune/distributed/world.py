"""The process group of a run as a mesh. One process is a mesh of size 1."""

import atexit
import functools
import gc
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tune import rehearsal
from tune.distributed.determinism import use_deterministic_kernels
from tune.distributed.pace import PACE
from tune.distributed.restarts import end_with_parent, launcher_store, of_this_start
from tune.distributed.srun import join_step
from tune.errors import TuneError
from tune.processor import device_type, present, require_kernels, use_expandable_segments
from tune.types import PositiveFloat, PositiveInt

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

T = TypeVar("T")
OWN_GROUPS: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()  # groups that this module created
LATEST: "dict[dist.ProcessGroup, World]" = {}  # by default process group; at most one entry


@dataclass(frozen=True)
class World:
    """`mesh` has all axes of `AXES`; unused ones have size 1.

    `sum` and `all_gather` are over the data: of the processes with the same data (ranks of cp, tp and pp), one value
    counts, that of the last stage. `any`, `broadcast`, `from_all_ranks` and `barrier` are over all processes.
    """

    mesh: DeviceMesh
    device: torch.device
    data: DeviceMesh  # the ranks that read different data: dp_replicate x dp_shard, flattened
    peers: DeviceMesh  # the ranks of a stage that read the same data: cp x tp, flattened
    shards: DeviceMesh  # the ranks that FSDP shards over: dp_shard x cp, after dp_replicate if that is above 1
    timeout: timedelta
    experts: DeviceMesh | None = None  # with expert parallelism: the same ranks as dp_replicate, dp_shard, ep, tp
    links: tuple[dist.ProcessGroup, ...] = ()  # groups of the ranks of pp, one per kind of message between stages
    pp_virtual: int = 1
    pp_schedule: PipelineSchedule = "1f1b"
    zero_stage: Literal[0, 1, 2, 3] = 3
    reduce_every_micro_batch: bool = True
    plan: Mapping[str, str] | None = None  # for tensor parallelism of models that do not declare shared layers
    loss_parallel: bool = True  # whether processes of tp share the rows of the head
    max_seq_len: int = 1  # tokens of a document, for the cost of attention when stages are balanced

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and messages."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The share of each global batch that this process reads, out of `data_size`."""
        return self.data.get_local_rank()

    @property
    def data_size(self) -> int:
        return self.data.size()

    @property
    def num_stages(self) -> int:
        """The number of processes that share the model's blocks (`parallel.pp`)."""
        return self.mesh.size(AXES.index("pp"))  # `mesh["pp"]` computes on the mesh's tensor

    @property
    def units_stay_gathered(self) -> bool:
        """Whether FSDP keeps weights gathered from the first forward of a step to its last backward."""
        return self.zero_stage in (1, 2) or self.num_stages > 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this process computes the head."""
        return self.rank >= self.size - self.size // self.num_stages

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """Sum over the data ranks, in fp64 so that counts stay exact. Processes that read the same data have the same
        value, e.g. the loss of a micro-batch, which counts once. Of pipeline stages, the value of the last one counts:
        it computes the loss. Does not synchronize with the device."""
        total = self._fp64(value)
        if not self.is_last_stage:
            total.zero_()
        return self._over_stages(total)

    def sum_of_parts(self, value: torch.Tensor | float) -> torch.Tensor:
        """Like `sum`, for a value of which each rank of cp and each stage has a part: the sum includes these ranks."""
        total = self._over_stages(self._fp64(value))
        if self.mesh.size(AXES.index("cp")) > 1:  # to take the axis out of the mesh would read its tensor
            dist.all_reduce(total, group=self.mesh.get_group("cp"))
        return total

    def means(self, totals: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the means of metrics over all processes; each metric of `totals` is (sum, count) `[2]`."""
        if not totals:
            return {}
        sums = self.sum(torch.stack([*totals.values()]))
        return {name: total / count for name, (total, count) in zip(totals, sums, strict=True)}

    def _over_stages(self, total: torch.Tensor) -> torch.Tensor:
        """Sum over the data ranks and the stages, in place."""
        dist.all_reduce(total, group=self.data.get_group())
        if self.links:  # there are stages; to take an axis out of the mesh would read its tensor
            dist.all_reduce(total, group=self.mesh.get_group("pp"))
        return total

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. The hosts exchange it, so nothing waits for the device. Each rank also
        sends its compute time since the last call, see PACE."""
        highest = torch.zeros(1 + self.size, dtype=torch.float64)
        highest[0], highest[1 + self.rank] = flag, PACE.take()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        is_set, *seconds = highest.numpy().tolist()
        PACE.add(seconds)
        return bool(is_set)

    def fetch(self, **values: torch.Tensor | float) -> dict[str, float]:
        """Return `values` as Python numbers, with one device synchronization for all of them. DTensors are gathered, so
        all ranks must call this."""
        if not values:
            return {}
        return dict(zip(values, torch.stack([self._fp64(value) for value in values.values()]).tolist(), strict=True))

    def _fp64(self, value: torch.Tensor | float) -> torch.Tensor:
        """Return a new fp64 tensor: on the GPU with CUDA, else on the host (mps has no fp64)."""
        device = self.device if self.device.type == "cuda" else torch.device("cpu")
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            return value.detach().to(device, torch.float64, copy=True)
        return torch.full((), value, dtype=torch.float64, device=device)  # unlike torch.tensor, does not synchronize

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        """Return the `value` of each data rank, on all ranks. Like `sum`, it takes one of the processes that read the
        same data: the first one of the last stage."""
        of_last_stage = self.size - self.size // self.num_stages
        return self.from_all_ranks(value)[of_last_stage :: self.peers.size()]

    def from_all_ranks(self, value: T) -> list[T]:
        """Return the `value` of each process on all processes, by rank. For what a process or its node has, such as
        files; see `all_gather` for results of the data."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def of_peers(self, make: Callable[[], T]) -> T:
        """Call `make` on the first of the processes that read the same data, and return its result on all of them. For
        functions that may return another result each time. If `make` raises, the other processes raise a TuneError
        with the same message."""
        return make() if self.peers.size() == 1 else _of_first(make, self.peers.get_group())

    def of_main(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and return its result on all ranks. If it raises, other ranks raise a TuneError with
        the same message."""
        return _of_first(make, None)

    def barrier(self) -> None:
        dist.barrier()

    def finish(self) -> None:
        """Call this on all processes after the last collective; they then leave the process group cleanly at exit.

        A process that exits without this call has failed and aborts its communicators. Otherwise NCCL would wait
        forever for processes that are in a collective.
        """
        atexit.unregister(_abort)
        atexit.register(_leave)


def _of_first(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Call `make` on the first process of a group and return its result on all; see `World.of_peers`."""
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            box[0] = make()
        except Exception as error:  # raised below, after the others have received it
            failure, box[1] = error, str(error)
    dist.broadcast_object_list(box, group=group, group_src=0)
    if box[1] is not None:
        raise failure or TuneError(box[1])
    return box[0]


def join(
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto", timeout: float = 60, deterministic: bool = False
) -> torch.device:
    """Join the process group that a launcher (torchrun, SLURM, Ray) describes; without a launcher, a group of one
    process. Returns the device of this process. `timeout` is in minutes; see `init` for `deterministic`. Raises
    TuneError if the device is not available or torch cannot use it."""
    if rehearsal.current():
        return torch.device("cpu")
    kind = device_type(device)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    if "RANK" not in os.environ:
        os.environ.update(join_step(dict(os.environ)) | os.environ)
    local_rank, size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    duration = timedelta(minutes=timeout)
    if kind == "cuda":
        if torch.cuda.device_count() == 1:  # SLURM may show each task only its own GPU
            local_rank = 0
        use_expandable_segments()
        if local_rank >= torch.cuda.device_count():
            found = torch.cuda.device_count()
            raise TuneError(
                f"device: no GPU for local rank {local_rank}; found {found} GPUs. Start fewer processes, or set "
                "device=cpu"
            )
        if deterministic:
            use_deterministic_kernels()
        torch.cuda.set_device(local_rank)
        require_kernels(torch.device(kind, local_rank))
    if kind == "mps" and size > 1:
        raise TuneError(f"device: mps supports one process; found {size}. Start one process, or set device=cpu")
    if not dist.is_initialized():
        store = dist.HashStore() if "RANK" not in os.environ else launcher_store(duration)
        place: Any = {}
        if store:  # else torch creates one
            rank = int(os.environ.get("RANK", 0))
            place = {"store": of_this_start(store, rank, size), "rank": rank, "world_size": size}
        _init_group(kind, timeout=duration, **place)
    atexit.unregister(_leave)
    atexit.register(_abort)
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)


def _alone_where_it_fails(make: Callable[..., World]) -> Callable[..., World]:
    """In a rehearsal, report an invalid layout and continue with one process, so that later checks still run. Planning
    also uses one process."""

    @functools.wraps(make)
    def init(*args: Any, **axes: Any) -> World:
        if (planning := rehearsal.planning()) and planning.take_axes(axes):
            return make()
        try:
            return make(*args, **axes)
        except TuneError as error:
            if (rehearsed := rehearsal.current()) is None:
                raise
            rehearsed.report(error)
            rehearsed.start_processes(1)
            return make()

    return init


@_alone_where_it_fails
def init(
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dp_replicate: PositiveInt = 1,
    dp_shard: PositiveInt | Literal["auto"] = "auto",
    cp: PositiveInt = 1,
    tp: PositiveInt = 1,
    ep: PositiveInt = 1,
    pp: PositiveInt = 1,
    pp_schedule: PipelineSchedule = "1f1b",
    pp_virtual: PositiveInt | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    reduce_every_micro_batch: bool = True,
    timeout: PositiveFloat = 60,
    plan: Mapping[str, str] | None = None,
    loss_parallel: bool = True,
    max_seq_len: PositiveInt = 1,
    deterministic: bool = False,
    auto: bool = False,
) -> World:
    """Join the process group that a launcher (torchrun, SLURM, Ray) describes; without a launcher, a group of one
    process.

    `deterministic` selects deterministic kernels on a GPU (see `use_deterministic_kernels`); a CPU's always are.

    `auto` asks a recipe's entry point to plan the layout; it is false by the time this function is called.

    `pp_schedule` is a schedule of `Pipeline`, and `pp_virtual` the number of stages per process (None: 2 for
    interleaved, else 1). Stages are balanced by the cost of blocks for documents of `max_seq_len` tokens.

    `zero_stage` sets what FSDP shards during a step (ZeRO, Rajbhandari et al., 2020): 0 nothing, 1 optimizer states, 2
    also gradients, 3 also weights. None is 3, with pipeline stages 2.

    `plan` gives layers the styles of `tune.distributed.plans`. Without `loss_parallel`, each process of `tp` has the
    whole head. `timeout` is in minutes. It must exceed the longest work of one process that others wait for, such as
    writing a large model.

    An existing process group is used as it is: its timeout and those of other groups stay.

    Raises:
        TuneError: the device is not available, or the mesh does not match the number of processes.
    """
    if auto and not rehearsal.current():
        raise TuneError(
            "auto: got true in tune.distributed.init. Only the setting parallel.auto is planned automatically; under "
            "another name, run `tune plan --search` and set the axes"
        )
    _require_schedule(pp, pp_schedule, pp_virtual, zero_stage)
    virtual = pp_virtual or (2 if pp_schedule == "interleaved" else 1)
    if zero_stage is None:
        zero_stage = 3 if pp == 1 else 2
    here, duration = join(device, timeout, deterministic), timedelta(minutes=timeout)
    present = {*dist.distributed_c10d._world.pg_map}
    shards = _count_shards(dp_replicate, dp_shard, cp, tp, ep, pp)
    if zero_stage == 0:
        dp_replicate, shards = dp_replicate * shards, 1
    shape = (pp, dp_replicate, shards, cp, tp)
    mesh = init_device_mesh("cuda" if here.type == "cuda" else "cpu", shape, mesh_dim_names=AXES)
    data = mesh["dp_replicate", "dp_shard"]._flatten("data")
    peers = mesh["cp", "tp"]._flatten("peers")
    replicas, sharding = mesh["dp_replicate"], mesh["dp_shard"]
    if cp > 1 and zero_stage == 0:
        replicas = mesh["dp_replicate", "cp"]._flatten("replicas")
    elif cp > 1:
        sharding = mesh["dp_shard", "cp"]._flatten("shards")
    experts = _mesh_of_experts(mesh, ep, copies=None if zero_stage == 0 else dp_replicate) if ep > 1 else None
    links = _links(mesh, virtual) if pp > 1 else ()
    _set_timeouts(present, duration)
    if replicas.size() > 1:
        sharding = DeviceMesh._concatenate([replicas, sharding])
    PACE.device, PACE.scale = here, 1.0
    world = rehearsal.stand_in(World)(
        mesh, here, data, peers, sharding, duration, experts, links,
        pp_virtual=virtual if pp > 1 else 1, pp_schedule=pp_schedule, zero_stage=zero_stage,
        reduce_every_micro_batch=reduce_every_micro_batch and zero_stage != 1,
        plan=plan, loss_parallel=loss_parallel, max_seq_len=max_seq_len,
    )  # fmt: skip
    if here.type == "cuda":
        _require_own_gpus(world)
    _remember(world)
    return world


def _require_schedule(pp: int, schedule: str, virtual: int | None, zero_stage: int | None) -> None:
    """Raise TuneError if settings of a pipeline conflict."""
    if zero_stage == 3 and pp > 1:
        raise TuneError(
            f"parallel.zero_stage: 3 conflicts with parallel.pp={pp}, where weights stay gathered in a step. Set it "
            "to 2 or less, or null"
        )
    if virtual is not None and (virtual > 1) != (schedule == "interleaved") and schedule != "zero_bubble":
        raise TuneError(
            f"parallel.pp_virtual: {virtual} conflicts with parallel.pp_schedule={schedule}: interleaved needs 2 or "
            "more, zero_bubble accepts any number, other schedules need 1. Set it to null"
        )


def _count_shards(dp_replicate: int, dp_shard: int | Literal["auto"], cp: int, tp: int, ep: int, pp: int) -> int:
    """Return the size of dp_shard. Raises TuneError if the axes do not match the number of processes or ep does not
    divide dp_shard x cp."""
    size = dist.get_world_size()
    shards = size // (dp_replicate * cp * tp * pp) if dp_shard == "auto" else dp_shard
    if dp_replicate * shards * cp * tp * pp != size:
        raise TuneError(
            f"parallel: dp_replicate={dp_replicate} x dp_shard={dp_shard} x cp={cp} x tp={tp} x pp={pp} does not match "
            f"{size} processes. dp_replicate x cp x tp x pp must divide {size}; dp_shard=auto uses the rest. "
            "--nproc-per-node sets the number of processes"
        )
    if shards * cp % ep:
        valid = " or ".join(str(number) for number in range(1, shards * cp + 1) if shards * cp % number == 0)
        raise TuneError(
            f"parallel.ep: {ep} does not divide dp_shard x cp = {shards * cp}. Set it to {valid}, or start more "
            "processes"
        )
    return shards


def _mesh_of_experts(mesh: DeviceMesh, ep: int, copies: int | None) -> DeviceMesh:
    """Return a mesh of a stage's ranks with the axes dp_replicate (`copies`; None: all groups), dp_shard, ep, tp."""
    pp, replicas, shards, cp, tp = mesh.shape
    groups = replicas * shards * cp // ep
    copies = copies or groups
    names = "pp", "dp_replicate", "dp_shard", "ep", "tp"
    grid = init_device_mesh(mesh.device_type, (pp, copies, groups // copies, ep, tp), mesh_dim_names=names)
    return grid[names[1:]]


def _links(mesh: DeviceMesh, virtual: int) -> tuple[dist.ProcessGroup, ...]:
    """Return groups of the ranks of pp, one per kind of message between stages."""
    ranks = mesh.mesh.view(mesh.shape[0], -1).T.tolist()
    groups = [dist.new_subgroups_by_enumeration(ranks)[0] for _ in range(3 if virtual > 1 else 1)]
    return mesh.get_group("pp"), *groups


def _require_own_gpus(world: World) -> None:
    """Raise TuneError if processes share a GPU."""
    gpus = len(set(world.from_all_ranks(str(torch.cuda.get_device_properties(world.device).uuid))))
    if gpus < world.size:
        raise TuneError(f"device: {world.size} processes share {gpus} GPUs. Start one per GPU, or set device=cpu")


class Unconnected(World):
    """A World whose process exchanges nothing. Other processes, if any, are assumed to have the same values."""

    def any(self, flag: bool) -> bool:
        return bool(flag)

    def broadcast(self, value: T) -> T:
        return value

    def all_gather(self, value: T) -> list[T]:
        return [value] * self.data_size

    def from_all_ranks(self, value: T) -> list[T]:
        return [value] * self.size

    def of_peers(self, make: Callable[[], T]) -> T:
        return make()

    def of_main(self, make: Callable[[], T]) -> T:
        return make()

    def barrier(self) -> None:
        pass

    def finish(self) -> None:
        pass


class OneProcess(Unconnected):
    """The World of a process without a process group; one is initialized when a mesh is first needed."""

    rank, size, data_rank, data_size, is_main, num_stages, is_last_stage = 0, 1, 0, 1, True, 1, True

    def __getattr__(self, name: str) -> Any:
        """Create fields when they are first read."""
        if name == "device":
            made = {name: _device_of(None)}
        elif name in ("mesh", "data", "peers", "shards"):
            if not dist.is_initialized():
                _init_group(present()[0], store=dist.HashStore(), rank=0, world_size=1, timeout=self.timeout)
                atexit.register(_leave)
            made = {each: getattr(_world_over(dist.group.WORLD), each) for each in ("mesh", "data", "peers", "shards")}
            _remember(self)
        else:
            raise AttributeError(name)
        vars(self).update(made)
        return made[name]

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        return self._fp64(value)

    def sum_of_parts(self, value: torch.Tensor | float) -> torch.Tensor:
        return self._fp64(value)


def current_world(world: World | None = None) -> World:
    """Return `world` if given, else the last World created over the default process group. Without one, return a World
    over that group whose processes read different data. Without a process group, return the World of one process.

    The first call for a group creates the groups of a mesh, so all processes must make it.

    Raises:
        TuneError: a launcher started several processes, but there is no process group yet.
    """
    if world is not None:
        return world
    if dist.is_initialized():
        default: Any = dist.group.WORLD
        if default not in LATEST:
            _remember(_world_over(default))
            atexit.register(LATEST.clear)  # its groups would keep their threads alive
        return LATEST[default]
    if (size := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise TuneError(
            f"WORLD_SIZE is {size}, but there is no process group. Call tune.distributed.init() or "
            "torch.distributed.init_process_group() first"
        )
    alone = object.__new__(OneProcess)
    vars(alone)["timeout"] = dist.constants.default_pg_timeout
    return alone


def _world_over(group: Any) -> World:
    """Return the World of a default process group whose processes all read different data and shard the weights."""
    here, timeout = _device_of(group), _timeout_of(group)
    shape, present = (1, 1, dist.get_world_size(), 1, 1), {*dist.distributed_c10d._world.pg_map}
    mesh = init_device_mesh("cuda" if here.type == "cuda" else "cpu", shape, mesh_dim_names=AXES)
    data = mesh["dp_replicate", "dp_shard"]._flatten("data")
    peers = mesh["cp", "tp"]._flatten("peers")
    _set_timeouts(present, timeout)
    return World(mesh, here, data, peers, mesh["dp_shard"], timeout)


def _init_group(kind: str, **place: Any) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", **place)
    OWN_GROUPS.add(dist.group.WORLD)  # type: ignore[arg-type]


def _set_timeouts(present: set[dist.ProcessGroup], timeout: timedelta) -> None:
    """Set the timeout of all groups of this module. Groups not in `present` are new: a mesh created them with torch's
    default timeout."""
    groups = {*dist.distributed_c10d._world.pg_map}
    OWN_GROUPS.update(groups - present)
    if dist.get_backend() != "fake":  # `tune validate` has no processes to wait for
        for group in groups & {*OWN_GROUPS}:
            group.set_timeout(timeout)


def _remember(world: World) -> None:
    LATEST.clear()
    LATEST[dist.group.WORLD] = world  # type: ignore[index]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the GPU of this process if the group communicates on GPUs; else the CPU, or mps for a single process, as
    in `join`."""
    kind = present()[0]
    if kind == "cuda" and (group is None or "nccl" in dist.get_backend_config(group)):
        if bound := getattr(group, "bound_device_id", None):
            return bound
        if torch.cuda.is_initialized():
            return torch.device("cuda", torch.cuda.current_device())
        # The same choice as init_device_mesh makes for a process without a device.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("mps" if kind == "mps" and (group is None or group.size() == 1) else "cpu")


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", dist.constants.default_pg_timeout)


def _leave() -> None:
    LATEST.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # groups in reference cycles join their threads; groups in DTensor's caches do not
        _pause()


def _abort() -> None:
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
        _pause()


def _pause() -> None:
    """Wait for gloo's threads to release the tensors of the last collectives. A release while the interpreter shuts
    down aborts the process ("terminate called without an active exception", exit code 134; torch 2.13)."""
    time.sleep(0.1)
