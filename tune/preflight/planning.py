"""Memory and speed of a job in a layout, and the fastest layout that fits."""

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tune.errors import TuneError
from tune.preflight.devices import Device
from tune.preflight.memory import GIB, Layout, Memory, memory, units
from tune.preflight.speed import Seconds, seconds
from tune.preflight.trace import Trace, shorten, trace

# What bounds a step, and what to change about it.
REMEDIES = {
    "products": "nothing need be; less recomputation (memory.activation_checkpointing) or more devices make it faster",
    "memory": "compile=true, a larger micro_batch_size or packed=true",
    "tensor": "a smaller parallel.tp",
    "sharding": "a larger micro_batch_size, parallel.dp_replicate (copies within a node), or "
    "parallel.reduce_every_micro_batch=false",
    "optimizer": "a larger global_batch_size",
    "offload": "memory.activation_offload=false, memory.cpu_offload=false, or more devices",
}


@dataclass(frozen=True)
class Plan:
    layout: Layout
    memory: Memory
    seconds: Seconds
    device: Device
    tokens: int  # of a step
    flops: float  # for a token, without recomputation

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device.memory * GIB and self.memory.host <= self.device.host_memory * GIB

    @property
    def tokens_per_second(self) -> float:
        """For each process."""
        return self.tokens / self.seconds.total / self.layout.size

    @property
    def mfu(self) -> float:
        return self.tokens_per_second * self.flops / (self.device.tflops * 1e12)

    @property
    def bottleneck(self) -> str:
        return max(vars(self.seconds), key=lambda name: getattr(self.seconds, name))

    def as_dict(self) -> dict[str, Any]:
        gib = {name: size / GIB for name, size in self.memory.parts.items()}
        return {
            "overrides": overrides(self.layout),
            "fits": self.fits,
            "memory_gib": gib | {"total": self.memory.total / GIB, "of": self.device.memory},
            "peak_at": self.memory.moment,
            "host_gib": self.memory.host / GIB,
            "step_seconds": self.seconds.total,
            "seconds": asdict(self.seconds),
            "tokens_per_step": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "bottleneck": self.bottleneck,
        }


def overrides(layout: Layout) -> list[str]:
    """The settings of a layout."""
    return [
        f"parallel.dp_replicate={layout.dp_replicate}",
        f"parallel.dp_shard={layout.dp_shard}",
        f"parallel.tp={layout.tp}",
        f"micro_batch_size={layout.micro_batch_size}",
        f"memory.activation_checkpointing={layout.checkpointing}",
        f"memory.activation_offload={str(layout.activation_offload).lower()}",
        f"memory.cpu_offload={str(layout.cpu_offload).lower()}",
    ]


class Job:
    """What is trained: `model` on the meta device, adapters and quantised weights put in; the `loss_fn`; rows of
    `seq_len` tokens, `global_batch_size` of them in a step. `states` are the optimizer's bytes for a trained parameter;
    `flops` are those of forward and backward for a token."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        device: Device,
        *,
        seq_len: int,
        global_batch_size: int,
        dtype: str,
        master_dtype: str,
        compile: bool,
        states: float,
        flops: float,
    ):
        self.short, self.loss_fn, self.device = shorten(model), loss_fn, device
        self.seq_len, self.global_batch_size = seq_len, global_batch_size
        self.types = {"dtype": dtype, "master_dtype": master_dtype}
        self.compile, self.states, self.flops = compile, states, flops
        modules = [each for each in model.modules() if not getattr(each, "casts_parameters", False)]
        self.trains = any(each.requires_grad for module in modules for each in module.parameters(recurse=False))
        self.trace = functools.cache(self._trace)

    def is_plain(self, layout: Layout) -> bool:
        """Whether the job runs without FSDP, as in `tune.distributed.parallelize`."""
        casts = self.trains and self.types["dtype"] != self.types["master_dtype"]
        return layout.size == 1 and not casts and not layout.cpu_offload

    def plan(self, layout: Layout, line: bool = False) -> Plan:
        """With `line`, the trace is the straight line through those of one row and of two."""
        self.require(layout)
        layout = replace(layout, micro_batches=self.global_batch_size // layout.data // layout.micro_batch_size)
        plain = self.is_plain(layout)
        key = layout.tp, layout.checkpointing, plain, layout.micro_batches > 1
        if line and layout.micro_batch_size > 2:
            found = self.trace(1, *key).scaled(self.trace(2, *key), layout.micro_batch_size)
        else:
            found = self.trace(layout.micro_batch_size, *key)
        return Plan(
            layout,
            memory(found, layout, self.states, plain, self.device),
            seconds(found, layout, self.states, plain, self.device),
            self.device,
            self.global_batch_size * self.seq_len,
            self.flops,
        )

    def checkpoint_bytes(self, layout: Layout) -> float:
        """Of a complete training state: trained parameters and the optimizer's states."""
        whole = units(self.trace(1, 1, layout.checkpointing, self.is_plain(layout), False))
        return whole.master + whole.trained * self.states

    def require(self, layout: Layout) -> None:
        together = layout.data * layout.micro_batch_size
        if self.global_batch_size % together:
            raise TuneError(
                f"global_batch_size={self.global_batch_size} is no multiple of {together} (micro_batch_size="
                f"{layout.micro_batch_size} x {layout.data} data-parallel processes)"
            )

    def _trace(self, rows: int, tp: int, checkpointing: str, plain: bool, accumulates: bool) -> Trace:
        return trace(
            self.short, self.loss_fn, self.device, rows=rows, seq_len=self.seq_len, **self.types,
            checkpointing=checkpointing, plain=plain, accumulates=accumulates, compile=self.compile, mesh=_mesh(tp),
        )  # fmt: skip

    def search(self, processes: int) -> list[Plan]:
        """All layouts of so many processes, the fastest that fit first, then those that need the least memory beyond.

        Tensor parallelism stays inside a node; micro-batches and copies are powers of 2. Of equally fast ones the
        simplest is first."""
        found = []
        for tp in (1, 2, 4, 8):
            if processes % tp or tp > self.device.per_node:
                continue
            try:
                found += [self.plan(layout, line=True) for layout in self._layouts(processes, tp)]
            except TuneError as error:
                if tp == 1 or not str(error).startswith("parallel.tp"):
                    raise
        if not found:
            raise TuneError(
                f"global_batch_size={self.global_batch_size} cannot be divided over {processes} processes: "
                "set it to a multiple of them"
            )
        return sorted(found, key=lambda plan: (not plan.fits, plan.seconds.total if plan.fits else plan.memory.total))

    def _layouts(self, processes: int, tp: int) -> Iterator[Layout]:
        data = processes // tp
        rows = self.global_batch_size // data if self.global_batch_size % data == 0 else 0
        for checkpointing in ("none", "selective", "full"):
            for copies in _powers(data):
                for micro in _powers(rows):
                    plain = Layout(copies, data // copies, tp, micro, 1, checkpointing)
                    yield plain
                    if self.device.host:
                        yield replace(plain, activation_offload=True)
                        yield replace(plain, cpu_offload=True)


def _powers(number: int) -> list[int]:
    """The powers of 2 that divide a number."""
    return [2**n for n in range(number.bit_length()) if number and number % 2**n == 0]


@functools.cache
def _mesh(tp: int) -> DeviceMesh | None:
    """A mesh of processes that are not there."""
    if tp == 1:
        return None
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    return DeviceMesh("cpu", torch.arange(tp), mesh_dim_names=("tp",))
