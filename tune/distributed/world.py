"""The process group of a run, as a mesh. One process is a mesh of size 1."""

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
OWN_GROUPS: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()  # that this module has made
LATEST: "dict[dist.ProcessGroup, World]" = {}  # by its default process group, of which there is one at a time


@dataclass(frozen=True)
class World:
    """`mesh` has all axes of `AXES`; unused ones have size 1."""

    mesh: DeviceMesh
    device: torch.device
    data: DeviceMesh  # the ranks that read different data: dp_replicate x dp_shard, flattened
    peers: DeviceMesh  # those of its stage that read the same: cp x tp
    shards: DeviceMesh  # those that FSDP shards over, dp_shard x cp, behind dp_replicate if that is above 1
    timeout: timedelta
    experts: DeviceMesh | None = None  # with expert parallelism the axes dp_replicate, dp_shard, ep of the same ranks
    links: tuple[dist.ProcessGroup, ...] = ()  # the ranks of pp, once for each kind of what stages send each other
    pp_virtual: int = 1
    pp_schedule: PipelineSchedule = "1f1b"
    zero_stage: Literal[0, 1, 2, 3] = 3
    reduce_every_micro_batch: bool = False
    plan: Mapping[str, str] | None = None  # of tensor parallelism, for layers that do not say it themselves
    loss_parallel: bool = True  # whether processes of tp share the rows of the head
    max_seq_len: int = 1  # of a document, by which attention counts where stages share blocks

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Rank 0, which writes files and messages."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """This process reads share `data_rank` of `data_size` of each global batch."""
        return self.data.get_local_rank()

    @property
    def data_size(self) -> int:
        return self.data.size()

    @property
    def num_stages(self) -> int:
        """The processes that `parallel.pp` shares the model's blocks among."""
        return self.mesh.size(AXES.index("pp"))  # `mesh["pp"]` computes on the mesh's tensor

    @property
    def units_stay_gathered(self) -> bool:
        """Whether FSDP keeps weights gathered from the first forward of a step to its last backward."""
        return self.zero_stage in (1, 2) or self.num_stages > 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this process knows what the head gives."""
        return self.rank >= self.size - self.size // self.num_stages

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """The sum over the data ranks, and over pipeline stages, each of which contributes a term (such as the loss,
        which is 0 on all but the last), in fp64, so that counts stay exact. Ranks of cp and tp are not summed: the loss
        that a model gives is that of the whole micro-batch on each. Does not synchronise with the device."""
        total = self._fp64(value)
        dist.all_reduce(total, group=self.data.get_group())
        if self.links:  # there are stages; to take an axis out of the mesh would read its tensor
            dist.all_reduce(total, group=self.mesh.get_group("pp"))
        return total

    def sum_of_parts(self, value: torch.Tensor | float) -> torch.Tensor:
        """As `sum`, of a value of which each rank of `cp` has a part: those ranks read the same data."""
        total = self.sum(value)
        if self.mesh["cp"].size() > 1:
            dist.all_reduce(total, group=self.mesh.get_group("cp"))
        return total

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. The hosts exchange it: nothing waits for the device. Each rank sends with
        it how long it has computed since the last call, see PACE."""
        highest = torch.zeros(1 + self.size, dtype=torch.float64)
        highest[0], highest[1 + self.rank] = flag, PACE.take()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        is_set, *seconds = highest.numpy().tolist()
        PACE.add(seconds)
        return bool(is_set)

    def fetch(self, **values: torch.Tensor | float) -> dict[str, float]:
        """The `values` as Python numbers: one synchronisation with the device for all of them. Sharded ones (DTensors)
        are gathered, on all ranks."""
        if not values:
            return {}
        return dict(zip(values, torch.stack([self._fp64(value) for value in values.values()]).tolist(), strict=True))

    def _fp64(self, value: torch.Tensor | float) -> torch.Tensor:
        """A new fp64 tensor: on the GPU with CUDA, else on the host (mps has no fp64)."""
        device = self.device if self.device.type == "cuda" else torch.device("cpu")
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            return value.detach().to(device, torch.float64, copy=True)
        return torch.full((), value, dtype=torch.float64, device=device)  # unlike torch.tensor, does not synchronise

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        """The `value` of each rank, on all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def of_peers(self, make: Callable[[], T]) -> T:
        """The result of `make` on the first of the processes that read the same data, for all of them: of functions
        that may give another result each time. Only the first one calls it. If it raises, the others raise a TuneError
        with the same message."""
        return make() if self.peers.size() == 1 else _of_first(make, self.peers.get_group())

    def of_main(self, make: Callable[[], T]) -> T:
        """The result of `make` on rank 0, for all. If it raises, the others raise a TuneError with the same message."""
        return _of_first(make, None)

    def barrier(self) -> None:
        dist.barrier()

    def finish(self) -> None:
        """Call on all processes after the last collective: they then leave the process group in order when they exit.

        A process that exits without this call has failed and aborts its communicators: others may be in a collective,
        for which NCCL would wait forever.
        """
        atexit.unregister(_abort)
        atexit.register(_leave)


def _of_first(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """The result of `make` on the first process of a group, for all of it; see `World.of_peers`."""
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            box[0] = make()
        except Exception as error:  # raised below, when the others have it
            failure, box[1] = error, str(error)
    dist.broadcast_object_list(box, group=group, group_src=0)
    if box[1] is not None:
        raise failure or TuneError(box[1])
    return box[0]


def join(
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto", timeout: float = 60, deterministic: bool = False
) -> torch.device:
    """Join the process group that a launcher (torchrun, SLURM, Ray) describes; without one, a group of one process.
    Gives the device of this process. `timeout` is in minutes; `deterministic` is that of `init`. Raises TuneError if
    the device is not available, or torch cannot use it."""
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
            raise TuneError(f"device: process {local_rank} has no GPU; {found} found. Start fewer, or set device=cpu")
        if deterministic:
            use_deterministic_kernels()
        torch.cuda.set_device(local_rank)
        require_kernels(torch.device(kind, local_rank))
    if kind == "mps" and size > 1:
        raise TuneError(f"device: mps is one device; found {size} processes. Start one process, or set device=cpu")
    if not dist.is_initialized():
        store = dist.HashStore() if "RANK" not in os.environ else launcher_store(duration)
        place: Any = {}
        if store:  # else torch makes one
            rank = int(os.environ.get("RANK", 0))
            place = {"store": of_this_start(store, rank, size), "rank": rank, "world_size": size}
        _init_group(kind, timeout=duration, **place)
    atexit.unregister(_leave)
    atexit.register(_abort)
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)


def _alone_where_it_fails(make: Callable[..., World]) -> Callable[..., World]:
    """In a rehearsal, have what does not depend on a layout go on in one process if there is no such layout. That of a
    plan is one of one process."""

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
    reduce_every_micro_batch: bool = False,
    timeout: PositiveFloat = 60,
    plan: Mapping[str, str] | None = None,
    loss_parallel: bool = True,
    max_seq_len: PositiveInt = 1,
    deterministic: bool = False,
    auto: bool = False,
) -> World:
    """Join the process group that a launcher (torchrun, SLURM, Ray) describes; without one, a group of one process.

    `deterministic` has a GPU take kernels that give the same bits each time (see `use_deterministic_kernels`); those of
    a CPU do anyway.

    `auto` asks a recipe's entry point to plan the layout: it is false when this function is called.

    `pp_schedule` is one of `Pipeline`, and `pp_virtual` the stages of each process; None is 2 for interleaved, else 1.
    Stages share blocks by what these cost in a document of `max_seq_len` tokens. `zero_stage` is what FSDP's devices
    share in a step (ZeRO, Rajbhandari et al., 2020): nothing, the optimizer's states, gradients too, weights too; None
    is 3, with stages of a pipeline 2.
    `plan` gives layers the styles of `tune.distributed.plans`. Without `loss_parallel` each process of `tp` has the
    whole head. `timeout` is in minutes. It must exceed the longest work of one process for which others wait, such as
    writing a large model.

    A process group that is there already is taken as it is: its timeout stays, and so do those of other groups.

    Raises:
        TuneError: the device is not available, or the mesh does not match the number of processes.
    """
    if auto and not rehearsal.current():
        raise TuneError(
            "auto: true reached tune.distributed.init. The entry point plans the layout of the setting parallel.auto; "
            "under another name, plan with `tune plan --search` and set the axes"
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
    """Raise TuneError if settings of a pipeline do not go together."""
    if zero_stage == 3 and pp > 1:
        raise TuneError(
            f"parallel.zero_stage: with parallel.pp={pp} weights stay gathered in a step. Set it to 2 or less, or null"
        )
    if virtual is not None and (virtual > 1) != (schedule == "interleaved") and schedule != "zero_bubble":
        raise TuneError(
            f"parallel.pp_virtual: {virtual} does not go with parallel.pp_schedule={schedule}: interleaved wants "
            "2 or more, zero_bubble takes any number, and the others have 1. Set it to null"
        )


def _count_shards(dp_replicate: int, dp_shard: int | Literal["auto"], cp: int, tp: int, ep: int, pp: int) -> int:
    """The size of dp_shard. Raises TuneError if the axes do not make the number of processes, or ep does not fit."""
    size = dist.get_world_size()
    shards = size // (dp_replicate * cp * tp * pp) if dp_shard == "auto" else dp_shard
    if dp_replicate * shards * cp * tp * pp != size:
        raise TuneError(
            f"parallel: dp_replicate={dp_replicate} x dp_shard={dp_shard} x cp={cp} x tp={tp} x pp={pp} does not make "
            f"{size} processes. dp_replicate x cp x tp x pp must divide {size} (--nproc-per-node starts more); with "
            "dp_shard=auto the rest follows"
        )
    if shards * cp % ep:
        valid = " or ".join(str(number) for number in range(1, shards * cp + 1) if shards * cp % number == 0)
        raise TuneError(
            f"parallel.ep: {ep} processes cannot be among the {shards * cp} of dp_shard x cp. Set it to {valid}, or "
            "start more"
        )
    return shards


def _mesh_of_experts(mesh: DeviceMesh, ep: int, copies: int | None) -> DeviceMesh:
    """The ranks of a stage as dp_replicate (`copies`; None: all of them), dp_shard, ep, tp."""
    pp, replicas, shards, cp, tp = mesh.shape
    groups = replicas * shards * cp // ep
    copies = copies or groups
    names = "pp", "dp_replicate", "dp_shard", "ep", "tp"
    grid = init_device_mesh(mesh.device_type, (pp, copies, groups // copies, ep, tp), mesh_dim_names=names)
    return grid[names[1:]]


def _links(mesh: DeviceMesh, virtual: int) -> tuple[dist.ProcessGroup, ...]:
    """The ranks of pp, once for each kind of what stages send each other."""
    ranks = mesh.mesh.view(mesh.shape[0], -1).T.tolist()
    groups = [dist.new_subgroups_by_enumeration(ranks)[0] for _ in range(3 if virtual > 1 else 1)]
    return mesh.get_group("pp"), *groups


def _require_own_gpus(world: World) -> None:
    """Raise TuneError if processes share a GPU."""
    gpus = len(set(world.all_gather(str(torch.cuda.get_device_properties(world.device).uuid))))
    if gpus < world.size:
        raise TuneError(f"device: {world.size} processes share {gpus} GPUs. Start one for each GPU, or set device=cpu")


class Unconnected(World):
    """A World whose process exchanges nothing: others, if it counts any, have what this one has."""

    def any(self, flag: bool) -> bool:
        return bool(flag)

    def broadcast(self, value: T) -> T:
        return value

    def all_gather(self, value: T) -> list[T]:
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
    """The World of a process without a process group, which is initialized where the first mesh is needed."""

    rank, size, data_rank, data_size, is_main, num_stages, is_last_stage = 0, 1, 0, 1, True, 1, True

    def __getattr__(self, name: str) -> Any:
        """Fields that are made when they are first read."""
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
    """`world`, if it is given. Else the last World that was made over the default process group; else one over that
    group, whose processes read different data; without a process group, that of a single process. All processes must
    make the first call over a group: it makes the groups of a mesh.

    Raises:
        TuneError: a launcher started several processes, and they have no process group yet.
    """
    if world is not None:
        return world
    if dist.is_initialized():
        default: Any = dist.group.WORLD
        if default not in LATEST:
            _remember(_world_over(default))
            atexit.register(LATEST.clear)  # whose groups would keep their threads
        return LATEST[default]
    if (size := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise TuneError(
            f"there is no process group, but WORLD_SIZE is {size}. Call tune.distributed.init() or "
            "torch.distributed.init_process_group() first"
        )
    alone = object.__new__(OneProcess)
    vars(alone)["timeout"] = dist.constants.default_pg_timeout
    return alone


def _world_over(group: Any) -> World:
    """The World of a default process group whose processes read different data. Those of FSDP share the weights."""
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
    """Of the groups that are not `present`, which a mesh has made with torch's default, and of earlier ones."""
    groups = {*dist.distributed_c10d._world.pg_map}
    OWN_GROUPS.update(groups - present)
    if dist.get_backend() != "fake":  # of `tune validate`: no processes, nothing to wait for
        for group in groups & {*OWN_GROUPS}:
            group.set_timeout(timeout)


def _remember(world: World) -> None:
    LATEST.clear()
    LATEST[dist.group.WORLD] = world  # type: ignore[index]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The GPU of this process, if there is one and the group communicates on it; else the host, or mps for a single
    process, as in `join`."""
    kind = present()[0]
    if kind == "cuda" and (group is None or "nccl" in dist.get_backend_config(group)):
        if bound := getattr(group, "bound_device_id", None):
            return bound
        if torch.cuda.is_initialized():
            return torch.device("cuda", torch.cuda.current_device())
        # As a mesh does, which sets the device of a process that has not.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("mps" if kind == "mps" and (group is None or group.size() == 1) else "cpu")


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", dist.constants.default_pg_timeout)


def _leave() -> None:
    LATEST.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # groups in cycles join their threads; those that DTensor's caches hold do not
        _pause()


def _abort() -> None:
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
        _pause()


def _pause() -> None:
    """Lets gloo's threads release the tensors of the last collectives: one that does it while the interpreter ends
    aborts the process ("terminate called without an active exception", 134 for its exit code; torch 2.13)."""
    time.sleep(0.1)
