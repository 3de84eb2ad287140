"""Memory and speed of a job in a layout, and the fastest layout that fits."""

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune import peft, quantization
from tune.config import instantiate
from tune.datasets.loader import require_batches
from tune.distributed import DTYPES
from tune.distributed.parallelize import cast_by_fsdp
from tune.errors import TuneError
from tune.loggers import flops_per_token
from tune.loggers.hardware import planned_memory
from tune.lookup import locate
from tune.losses.chunks import default_chunk_tokens
from tune.preflight.devices import Device
from tune.preflight.memory import GIB, Layout, bytes_of_states, memory
from tune.preflight.speed import seconds
from tune.preflight.trace import Trace, shorten, trace

# The settings of a layout that a search chooses.
CHOSEN = (
    *("parallel.dp_replicate", "parallel.dp_shard", "parallel.tp", "micro_batch_size"),
    *("memory.activation_checkpointing", "memory.activation_offload", "memory.cpu_offload"),
)
KEPT = ("parallel.reduce_every_micro_batch", "optimizer_in_backward")


@dataclass(frozen=True)
class Plan:
    """A step of `tokens` tokens, each of so many `flops` without recomputation. `memory` are bytes by part at the
    `moment` of the peak, `host` those in host memory, `seconds` are by what takes them."""

    layout: Layout
    device: Device
    moment: str
    memory: dict[str, float]
    host: float
    seconds: dict[str, float]
    tokens: int
    flops: float

    @property
    def peak(self) -> float:
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.memory * GIB and self.host <= self.device.host_memory * GIB

    @property
    def overrides(self) -> list[str]:
        """The settings of the layout."""
        return [f"{key}={str(getattr(self.layout, _field(key))).lower()}" for key in CHOSEN]

    def as_dict(self) -> dict[str, Any]:
        speed = self.tokens / self.step_seconds / self.layout.size
        sizes = {name: size / GIB for name, size in self.memory.items()}
        return {
            "overrides": self.overrides,
            "fits": self.fits,
            "memory_gib": sizes | {"total": self.peak / GIB, "of": self.device.memory},
            "peak_at": self.moment,
            "host_gib": self.host / GIB,
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "tokens_per_step": self.tokens,
            "tokens_per_second": speed,
            "mfu": speed * self.flops / (max(self.device.tflops, self.device.tflops_fp32) * 1e12),
            "bottleneck": max(self.seconds, key=lambda name: self.seconds[name]),
        }


def _field(key: str) -> str:
    return key.rpartition(".")[2]


class Job:
    """What the settings train on such a device. The data need not exist: all rows have `max_seq_len` tokens.

    Raises:
        TuneError: this recipe, or this setting, is not planned.
    """

    def __init__(self, cfg: DictConfig, device: Device):
        component = cfg.get("loss", {}).get("_component_")
        if not component or getattr(locate(component), "rows", None) or {"max_prompt_len", "teacher"} & set(cfg):
            raise TuneError(
                "plan: this recipe does more than a forward and a backward of one model; planned are full_finetune and "
                "lora_finetune"
            )
        for name in ("qat", "float8"):
            if cfg.get("quantization", {}).get(name):
                raise TuneError(f"quantization.{name}: what rounding takes is not planned yet; plan without it")
        if others := [f"{axis}={cfg.parallel[axis]}" for axis in ("cp", "ep", "pp") if cfg.parallel.get(axis, 1) != 1]:
            raise TuneError(
                f"parallel.{others[0]}: this axis is not planned yet; planned are dp_replicate, dp_shard and tp"
            )
        with torch.device("meta"):
            model = instantiate(cfg.model)
        if cfg.get("quantization", {}).get("weights"):
            quantization.quantize_linears(model, double=cfg.quantization.double)
        if "adapter" in cfg:
            peft.add_adapters(model, instantiate(cfg.adapter))
        if device.name != "cpu" and "chunk_tokens" in cfg.loss and cfg.loss.chunk_tokens is None:
            cfg.loss.chunk_tokens = default_chunk_tokens(torch.empty(model.config.vocab_size, 1, device="meta"))
        self.cfg, self.device = cfg, device
        self.short, self.loss_fn = shorten(model), instantiate(cfg.loss)
        self.flops = flops_per_token(model, cfg.max_seq_len)
        self.casts = bool(cast_by_fsdp(model, cfg.dtype, cfg.master_dtype))
        self.states = bytes_of_states(functools.partial(instantiate, cfg.optimizer), DTYPES[cfg.master_dtype])
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        kept = planned_memory(model, cfg.dtype, cfg.master_dtype, shards=1)["gradients"]  # they are like the weights
        self.checkpoint_gib = kept + trained * self.states / GIB
        self.trace = functools.cache(self._trace)

    def layout(self, processes: int) -> Layout:
        """That of the settings."""
        found = Layout(**{_field(key): OmegaConf.select(self.cfg, key) for key in (*CHOSEN, *KEPT)})
        if cast(Any, found.dp_shard) == "auto":
            found = replace(found, dp_shard=processes // (found.dp_replicate * found.tp))
        if found.size != processes:
            raise TuneError(
                f"parallel: dp_replicate={found.dp_replicate} x dp_shard={self.cfg.parallel.dp_shard} x tp={found.tp} "
                f"does not make --world-size {processes}"
            )
        return found

    def plan(self, layout: Layout, line: bool = False) -> Plan:
        """With `line`, the trace is the straight line through those of one row and of two."""
        rows, micro = self.cfg.global_batch_size, layout.micro_batch_size
        require_batches(layout.data, rows, micro, accumulate=not layout.optimizer_in_backward)
        layout = replace(layout, micro_batches=rows // layout.data // micro)
        plain = layout.size == 1 and not self.casts and not layout.cpu_offload  # as `parallelize` has it
        key = layout.tp, layout.activation_checkpointing, plain, plain and layout.micro_batches > 1
        if line and micro > 2:
            found = self.trace(1, *key).scaled(self.trace(2, *key), micro)
        else:
            found = self.trace(micro, *key)
        needed = memory(found, layout, self.states, plain, self.device)
        spent = seconds(found, layout, self.states, plain, self.device)
        return Plan(layout, self.device, *needed, spent, rows * self.cfg.max_seq_len, self.flops)

    def _trace(self, rows: int, tp: int, checkpointing: str, plain: bool, accumulates: bool) -> Trace:
        return trace(
            self.short, self.loss_fn, self.cfg, self.device, rows=rows, mesh=_mesh(tp), checkpointing=checkpointing,
            plain=plain, accumulates=accumulates,
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
                found += [self.plan(layout, line=True) for layout in self._layouts(processes // tp, tp)]
            except TuneError as error:
                if tp == 1 or not str(error).startswith("parallel.tp"):
                    raise
        if not found:
            raise TuneError(
                f"global_batch_size={self.cfg.global_batch_size} cannot be divided over {processes} processes: "
                "set it to a multiple of them"
            )
        return sorted(found, key=lambda plan: (not plan.fits, plan.step_seconds if plan.fits else plan.peak))

    def _layouts(self, data: int, tp: int) -> Iterator[Layout]:
        rows = self.cfg.global_batch_size // data if self.cfg.global_batch_size % data == 0 else 0
        kept = {_field(key): OmegaConf.select(self.cfg, key) for key in KEPT}
        for checkpointing in ("none", "selective", "full"):
            for copies in _powers(data):
                for micro in [rows] if kept["optimizer_in_backward"] else _powers(rows):
                    plain = Layout(copies, data // copies, tp, micro, checkpointing, **kept)
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
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    return DeviceMesh("cpu", torch.arange(tp), mesh_dim_names=("tp",))


def calibrate(run: Path, device: Device) -> Device:
    """The device as it was in `run`, which is written there: with the speed, and the memory that is not for tensors, at
    which it takes what was measured. Raises TuneError."""
    files = {name: run / name for name in ("run.json", "config.yaml", "metrics.jsonl")}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise TuneError(f"--calibrate: {run} has no {' and no '.join(missing)}: it is not the folder of a run")
    lines = [json.loads(line) for line in files["metrics.jsonl"].read_text().splitlines()]
    steps = [each for each in lines if "step_seconds" in each][1:]  # the first one warms up
    if not steps:
        raise TuneError(f"--calibrate: {run} has not two steps to measure")
    cfg = cast(DictConfig, OmegaConf.load(files["config.yaml"]))
    cfg.max_seq_len = round(median(each["tokens"] for each in steps) / cfg.global_batch_size)
    job = Job(cfg, device)
    plan = job.plan(job.layout(json.loads(files["run.json"].read_text())["processes"]))
    measured = median(each["step_seconds"] - each["data_seconds"] for each in steps)
    waits = sum(plan.seconds[name] for name in ("tensor", "sharding", "offload"))
    speed = (plan.step_seconds - waits) / max(measured - waits, 0.1 * measured)
    tensors = (plan.peak - plan.memory["reserve"]) / GIB
    found = replace(
        device,
        product_share=device.product_share * speed,
        attention_share=device.attention_share * speed,
        bandwidth_share=device.bandwidth_share * speed,
        launch=device.launch / speed,
        reserve=max(0.0, max(each["peak_memory_gib"] for each in steps) - (1 + device.reserve_share) * tensors),
    )
    (run / "device.json").write_text(json.dumps(asdict(found), indent=2) + "\n")
    return found
