"""The processes of a run: one on a laptop, thousands on a cluster, and the same code for both."""

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tune.distributed.restarts import launcher_store, of_this_start
from tune.distributed.slurm import join_step
from tune.errors import TuneError

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")

T = TypeVar("T")
ALLOCATOR_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}


@dataclass(frozen=True)
class World:
    """The process group as a mesh of the axes `AXES`, of size 1 where unused. One process is a mesh of one."""

    mesh: DeviceMesh
    device: torch.device
    data: DeviceMesh  # the processes that read different data: dp_replicate and dp_shard as one axis
    timeout: timedelta

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes what is written once."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of each global batch this process reads."""
        return self.data.get_local_rank()

    @property
    def data_size(self) -> int:
        return self.data.size()

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """The sum over the data ranks, in fp64, so that counts stay exact. Does not wait for the device."""
        total = self._figure(value)
        dist.all_reduce(total, group=self.data.get_group())
        return total

    def any(self, flag: bool) -> torch.Tensor:
        """1 if `flag` is set in any process, of all axes, or 0. Does not wait for the device."""
        highest = self._figure(float(flag))
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return highest

    def fetch(self, **values: torch.Tensor | float) -> dict[str, float]:
        """Numbers of the device, by name, on the host: waits for the device, once for all of them."""
        return dict(zip(values, torch.stack([self._figure(value) for value in values.values()]).tolist(), strict=True))

    def _figure(self, value: torch.Tensor | float) -> torch.Tensor:
        """In fp64, as a new tensor; where the device has no such type, on the host."""
        device = self.device if self.device.type == "cuda" else torch.device("cpu")
        if isinstance(value, torch.Tensor):
            return value.detach().to(device, torch.float64, copy=True)
        return torch.full((), value, dtype=torch.float64, device=device)  # a copy from the host would wait

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

    def barrier(self) -> None:
        dist.barrier()

    def finish(self) -> None:
        """To be called by all processes after the last collective: at their end they then leave the group in order.

        A process that ends without this call has failed. The others may be in a collective, and NCCL would wait for
        them for ever: it aborts its part.
        """
        atexit.unregister(_abort)
        atexit.register(_leave)


def init(
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dp_replicate: int = 1,
    dp_shard: int | Literal["auto"] = "auto",
    timeout: float = 60,
) -> World:
    """Join the process group that a launcher (torchrun, SLURM, Ray) describes; without one, be alone.

    `timeout` is in minutes: more than the slowest thing that one process does while others wait for it, such as writing
    a large model, takes.

    Raises:
        TuneError: the device is not there, or the mesh does not match the number of processes.
    """
    kind = _device_type(device)
    if "RANK" not in os.environ:
        os.environ.update(join_step(dict(os.environ)) | os.environ)
    local_rank, size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    patience = timedelta(minutes=timeout)
    if kind == "cuda":
        if torch.cuda.device_count() == 1:  # SLURM can show each task its own GPU alone
            local_rank = 0
        if not ALLOCATOR_SETTINGS & os.environ.keys():  # read when the device is first used
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if local_rank >= torch.cuda.device_count():
            raise TuneError(
                f"device: process {local_rank} of this machine has no GPU; {torch.cuda.device_count()} found. "
                f"Start at most that many processes (--nproc-per-node), or set device=cpu"
            )
        torch.cuda.set_device(local_rank)
    if kind == "mps" and size > 1:
        raise TuneError(f"device: mps is one device; found {size} processes. Start one process, or set device=cpu")
    if not dist.is_initialized():
        store = dist.HashStore() if "RANK" not in os.environ else launcher_store(patience)
        place: Any = {}
        if store:  # else torch makes one
            rank = int(os.environ.get("RANK", 0))
            place = {"store": of_this_start(store, rank, size), "rank": rank, "world_size": size}
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=patience, **place)
    atexit.unregister(_leave)
    atexit.register(_abort)
    size = dist.get_world_size()
    shards = size // dp_replicate if dp_shard == "auto" else dp_shard
    if dp_replicate * shards != size:
        raise TuneError(
            f"parallel: dp_replicate={dp_replicate} x dp_shard={dp_shard} does not make {size} processes. "
            f"dp_replicate must divide {size}; with dp_shard=auto the rest follows"
        )
    sizes = {"dp_replicate": dp_replicate, "dp_shard": shards}
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    mesh = init_device_mesh("cuda" if kind == "cuda" else "cpu", shape, mesh_dim_names=AXES)
    data = mesh["dp_replicate", "dp_shard"]._flatten("data")
    for group in [*mesh.get_all_groups(), data.get_group()]:
        dist.distributed_c10d._set_pg_timeout(patience, group)  # those of a mesh are made with torch's default
    world = World(mesh, torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind), data, patience)
    if kind == "cuda" and (shared := size - len(set(world.all_gather(_gpu(local_rank))))):
        raise TuneError(
            f"device: {size} processes have {size - shared} GPUs. Start one process for each GPU (it may see that one "
            "alone, or all of its node), or set device=cpu"
        )
    return world


def _device_type(device: str) -> str:
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(kind for kind, there in present.items() if there)
    if not present[device]:
        there = ", ".join(kind for kind, is_there in present.items() if is_there)
        raise TuneError(f"device: {device} is not available on this machine; available: {there}")
    return device


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _abort() -> None:
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
