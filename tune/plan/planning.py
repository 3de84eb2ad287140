"""Memory and speed of a job in a layout, and the fastest layout that fits."""

import functools
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune.config import instantiate
from tune.datasets import beyond_positions, require_batches
from tune.devices import Device
from tune.distributed import DTYPES, LARGE, cast_by_fsdp, repeated_blocks, split_blocks
from tune.errors import TuneError
from tune.optimizers import parameter_groups
from tune.plan.alter import alter
from tune.plan.memory import GIB, IN_STEP, PARTS, Checkpointing, Layout, PlannedStage, bytes_of_states, memory
from tune.plan.objectives import as_rows, full_rows, read_together, subjects
from tune.plan.speed import seconds
from tune.plan.trace import Trace, trace
from tune.run import flops_per_token, planned_memory
from tune.types import as_given

# The settings of a layout that a search chooses.
CHOSEN = (
    *(f"parallel.{axis}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp", "zero_stage")),
    "micro_batch_size",
    *("memory.activation_checkpointing", "memory.activation_offload", "memory.cpu_offload"),
)
INPUT = 7e-8  # seconds of a core for a token of a batch: 60 to 90 ns, in rows of 1,000 tokens and in packed ones
LEAST_TOKENS = 4096  # of a row, on each device of cp: with fewer, gathering keys takes longer than what is saved
KEPT = ("parallel.pp_schedule", "parallel.reduce_every_micro_batch")


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
    chosen: tuple[str, ...] = CHOSEN  # of these the recipe has settings

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
    def settings(self) -> dict[str, Any]:
        """Those of the layout."""
        return {key: getattr(self.layout, _field(key)) for key in self.chosen}

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={as_given(value)}" for key, value in self.settings.items()]

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
    """What the settings train on such devices, in so many processes. The data need not exist: all rows have
    `max_seq_len` tokens.

    Raises:
        TuneError: this recipe, or this setting, is not planned.
    """

    def __init__(self, cfg: DictConfig, device: Device, processes: int):
        cfg, device = as_rows(cfg), device.shared_by(processes)
        with torch.device("meta"):
            model = instantiate(cfg.model)
        if OmegaConf.select(cfg, "quantization.float8") and not (device.is_host or device.float8):
            raise TuneError(f"quantization.float8: {device.name} has no products in float8. Leave it out")
        alter(cfg, model, torch.device("cpu" if device.is_host else "cuda"), lambda _, make: make())
        self.cfg, self.device, self.processes = cfg, device, processes
        self.cost = getattr(model, "cost", "")  # of a model that transformers computes
        self.hidden, self.note = getattr(model.config, "hidden_size", 0), beyond_positions(model, cfg.max_seq_len)
        self.chosen = tuple(key for key in CHOSEN if "parallel." not in key or _field(key) in cfg.parallel)
        self.subjects = subjects(cfg, model)
        row = full_rows(cfg, 1)
        self.row_tokens = row.num_tokens  # also of the mismatched answer that comes with a labelled one
        self.flops = flops_per_token(model, row.num_tokens // len(row.documents.lengths))
        self.casts = bool(cast_by_fsdp(model, cfg.dtype, cfg.master_dtype))
        kept = planned_memory(model, cfg.dtype, cfg.master_dtype, shards=1)["gradients"]  # they are like the weights
        trained, states = _states(cfg, model)
        self.states = states / max(1, trained)
        self.checkpoint_gib = kept + states / GIB
        every, last, self.copies = cfg.checkpointer.every, cfg.max_steps, ""
        if cfg.checkpointer.get("async", True):
            self.copies = "beside" if every and not (last and last <= every) else "end"
        # By rows, the sizes of (tp, cp, ep), checkpointing, whether FSDP has nothing to do, whether it accumulates, and
        # the number of the subject.
        self.trace = functools.cache(lambda rows, axes, checkpointing, plain, accumulates, number=0: trace(
            self.subjects[number], full_rows(cfg, rows), device, meshes=_meshes(*axes), checkpointing=checkpointing,
            plain=plain, accumulates=accumulates,
        ))  # fmt: skip
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        looked_up = [] if getattr(model, "head", None) is None else tables
        of_products = {*model.parameters()}.difference(looked_up)
        large = sum(each.numel() for each in of_products if each.dim() == 2 and each.numel() >= LARGE)
        self.packed = large * DTYPES[cfg.dtype].itemsize * device.is_host  # while completions are sampled
        self.layers = len(repeated_blocks(model))
        self.experts = max(getattr(each, "num_experts", 1) for each in model.modules())
        self.blocks = functools.cache(functools.partial(split_blocks, model, length=cfg.max_seq_len))

    def layout(self) -> Layout:
        """That of the settings."""
        found = Layout(**self._settings(*CHOSEN, *KEPT))
        if cast(Any, found.dp_shard) == "auto":
            found = replace(found, dp_shard=self.processes // (found.dp_replicate * found.cp * found.tp * found.pp))
        if found.pp_schedule not in ("1f1b", "gpipe"):
            raise TuneError(f"parallel.pp_schedule: {found.pp_schedule} is not planned yet; planned are 1f1b and gpipe")
        if found.zero_stage == 0:
            found = replace(found, dp_replicate=found.data, dp_shard=1)
        if found.size != self.processes:
            raise TuneError(
                f"parallel: dp_replicate={found.dp_replicate} x dp_shard={self.cfg.parallel.dp_shard} x cp={found.cp} "
                f"x tp={found.tp} x pp={found.pp} does not make --world-size {self.processes}"
            )
        if found.shards % found.ep:
            raise TuneError(f"parallel.ep: {found.ep} does not divide dp_shard x cp, which are {found.shards}")
        return found

    def _settings(self, *keys: str) -> dict[str, Any]:
        """Of those that the recipe has, by the names of the layout."""
        values = {_field(key): OmegaConf.select(self.cfg, key) for key in keys}
        return {name: value for name, value in values.items() if value is not None}

    def plan(self, layout: Layout, line: bool = False) -> Plan:
        """With `line`, the trace is the straight line through those of one row and of two, or groups that share their
        prompts."""
        rows, micro = self.cfg.global_batch_size, layout.micro_batch_size
        group = self.cfg.get("group_size", 1)
        if samples := self.subjects[-1].place == "rollout":
            mine = self._prompts(layout) * group
        else:
            require_batches(rows, micro, layout.data, layout.pp)
            mine = rows // layout.data
        layout = replace(layout, micro_batches=-(-mine // micro))
        plain = layout.size == 1 and not self.casts and not layout.cpu_offload  # as `parallelize` has it
        axes = layout.tp, layout.cp, layout.ep

        def traced(*key: Any) -> Trace:
            unit = group if micro > group else 1
            if line and micro > 2 * unit:
                return self.trace(unit, axes, *key).scaled(self.trace(2 * unit, axes, *key), -(-micro // unit))
            return self.trace(micro, axes, *key)

        found = traced(layout.activation_checkpointing, plain, plain and layout.micro_batches > 1)
        stages, hop = [PlannedStage(found)], 0.0
        if layout.pp > 1:
            hop = micro * self.row_tokens * self.hidden * DTYPES[self.cfg.dtype].itemsize / layout.cp
            stages = self._stages(found, layout, hop)
        spent = [seconds(each, layout, self.states, plain, self.device, hop) for each in stages]
        longest, needed = max(spent, key=lambda each: sum(each.values())), []
        frozen = in_head = 0.0
        for number, each in enumerate(self.subjects[1:], 1):
            if each.place == "rollout":
                continue
            other, alone = traced("none", layout.size == 1, False, number), replace(layout, cpu_offload=False)
            given = PlannedStage(other), alone, 0.0, layout.size == 1, self.device
            more = seconds(*given, hop)
            longest = {name: value + each.passes * more[name] for name, value in longest.items()}
            beside = found.whole.stored / layout.shards if each.place == "beside" else 0.0
            _, parts, host = memory(*given, frozen=beside)
            needed.append(("before the first step", parts, host))
            if each.place == "head":
                stays = layout.throughout(other)
                frozen, in_head = parts["weights"] + stays, sum(parts[name] for name in IN_STEP) - stays
        fixed = self.states, plain, self.device, self.copies, frozen, in_head
        needed += [memory(each, layout, *fixed) for each in stages]
        if samples:
            longest = {name: self.cfg.updates * value for name, value in longest.items()}
            parts, longest["rollout"] = self._rollout(found, layout, plain, frozen)
            needed.append(("rollout", parts, 0.0))
        # A thread puts the next rows together beside the step.
        longest["input"] = max(0.0, mine * self.row_tokens * INPUT - sum(longest.values()))
        moment, parts, _ = max(needed, key=lambda each: sum(each[1].values()))
        return Plan(
            layout, self.device, moment, parts, max(host for *_, host in needed), longest,
            rows * self.row_tokens, self.flops, self.chosen,
        )  # fmt: skip

    def _prompts(self, layout: Layout) -> int:
        """Those of which a process samples completions."""
        return -(-self.cfg.prompts_per_step // layout.data)

    def _rollout(self, trained: Trace, layout: Layout, plain: bool, frozen: float) -> tuple[dict[str, float], float]:
        """Bytes by part and seconds of the completions of a step, which are all as long as they may be."""
        prompts, new = self._prompts(layout), self.cfg.sampling.max_new_tokens
        samples = prompts * self.cfg.group_size
        rows = min(self.cfg.sampling.get("max_rows", 64), samples)
        axes, last = (layout.tp, layout.cp, layout.ep), len(self.subjects) - 1
        read, sampled = (self.trace(rows, axes, "none", plain, False, number) for number in (last - 1, last))
        forwards = (read, -(-prompts // read_together(self.cfg, rows))), (sampled, -(-samples // rows) * new)
        spent = self.device.transfer(read.whole.gathered, layout.tp * layout.shards) if layout.shards > 1 else 0.0
        for found, number in forwards:
            parts = [(found.embed, 1), (found.loss, 1), *((kind.forward, kind.number) for kind in found.blocks)]
            spent += number * sum(count * (each.compute + each.exchange) for each, count in parts)
        in_blocks = [kind.forward.extra - kind.forward.live for found, _ in forwards for kind in found.blocks]
        above = max(*in_blocks, read.loss.extra, sampled.loss.extra)
        copied = trained.whole.master + trained.whole.trained * self.states if self.copies == "beside" else 0.0
        sizes = {
            "weights": trained.whole.stored / layout.shards + self.packed / layout.tp,
            "optimizer": trained.whole.trained * self.states / layout.shards,
            "activations": read.embed.live + read.saved + above,
            "communication": read.whole.gathered,
            "frozen": frozen,
            "checkpoint": copied / layout.shards if self.device.is_host else 0.0,
        }
        if layout.cpu_offload:
            sizes |= {"weights": 0.0, "optimizer": 0.0}
        reserve = self.device.reserve * GIB + self.device.reserve_share * sum(sizes.values())
        return dict.fromkeys(PARTS, 0.0) | sizes | {"reserve": reserve}, spent

    def _stages(self, whole: Trace, layout: Layout, hop: float) -> list[PlannedStage]:
        """Those that differ. What a stage has sent, it keeps until as much has followed."""
        stages, found = self.blocks(layout.pp), dict[Any, PlannedStage]()
        for number, blocks in enumerate(stages):
            behind, ends = layout.pp - 1 - number, (number == 0, number == layout.pp - 1)
            held = min(behind + 1, layout.micro_batches) if layout.pp_schedule == "1f1b" else layout.micro_batches
            kinds = [len({*places} & {*blocks}) for _, places in self.subjects[0].kinds]
            sent = (2 - sum(ends)) * min(layout.pp, layout.micro_batches) * hop
            found.setdefault(
                (*ends, *kinds), PlannedStage(whole.stage(kinds, *ends), held, sent)
            )  # the first holds most
        return list(found.values())

    def search(self) -> list[Plan]:
        """All layouts, the fastest that fit first, then the smallest, by docs/planning.md."""
        found: list[Plan] = []
        for axes in self._axes():
            try:
                found += self._plans(*axes)
            except TuneError as error:
                if axes == (1, 1, 1, 1) or not str(error).startswith("parallel."):
                    raise
        if not found:
            rows, size = self.cfg.global_batch_size, self.processes
            good = " or ".join(str(each) for each in (rows // size * size, -(-rows // size) * size) if each)
            raise TuneError(
                f"global_batch_size={rows} cannot be divided over {size} processes, of which parallel.tp, cp and pp "
                f"may take powers of 2: set it to {good}"
            )

        def rank(plan: Plan) -> tuple[bool, float]:
            return not plan.fits, plan.step_seconds if plan.fits else plan.peak

        while (found := sorted(found, key=rank))[0] != (exact := self.plan(found[0].layout)):
            found[0] = exact  # it was on a line through fewer rows
        return found

    def _axes(self) -> Iterator[tuple[int, int, int, int]]:
        """Sizes of tp, cp, ep and pp, the simplest first."""
        parallel, node = self.cfg.parallel, self.device.per_node
        sizes = {
            "pp": self.layers if parallel.get("pp_schedule") in ("1f1b", "gpipe") else 1,
            "cp": max(1, self.cfg.max_seq_len // LEAST_TOKENS) if "cp" in parallel else 1,
            "ep": min(node, self.experts) if "ep" in parallel else 1,
            "tp": min(node, 8) if "tp" in parallel else 1,
        }
        for pp, cp, ep, tp in itertools.product(*(_powers(0, most) for most in sizes.values())):
            rest = self.processes // (tp * cp * pp)
            if rest * tp * cp * pp == self.processes and rest * cp % ep == 0:
                yield tp, cp, ep, pp

    def _plans(self, tp: int, cp: int, ep: int, pp: int) -> Iterator[Plan]:
        data = self.processes // (tp * cp * pp)
        rows = self.cfg.global_batch_size // data if self.cfg.global_batch_size % data == 0 else 0
        first = Layout(**self._settings(*KEPT), tp=tp, cp=cp, ep=ep, pp=pp)
        micros = _powers(rows, rows // pp)
        offloads: list[dict[str, Any]] = [{}]
        if pp == 1 and not self.device.is_host:
            offloads += [{"activation_offload": True}, {"cpu_offload": True}]
        all_copies = [each for each in _powers(data, data) if data // each * cp % ep == 0] if micros else []
        for checkpointing, offload in itertools.product(get_args(Checkpointing), offloads):
            if checkpointing == "selective" and "activation_offload" in offload and self.cfg.compile is not True:
                continue  # see tune.rules.combinations
            for copies in all_copies:
                for micro in micros[: 1 if cp > 1 else None]:
                    layout = replace(
                        first, dp_replicate=copies, dp_shard=data // copies, micro_batch_size=micro,
                        activation_checkpointing=checkpointing, **offload,
                    )  # fmt: skip
                    plan = self.plan(layout, line=True)
                    yield plan
                    if not plan.fits:
                        break
                    if "zero_stage" in self.cfg.parallel and layout.shards > 1 and pp == 1:
                        yield from (self.plan(replace(layout, zero_stage=stage), line=True) for stage in (2, 1))
                if not plan.fits and micro == micros[0]:
                    break


def _states(cfg: DictConfig, model: Any) -> tuple[int, float]:
    """The number of trained parameters, and bytes of the optimizer's states for all of them. Muon has other states for
    embedding and head than for blocks."""
    trained, states = 0, 0.0
    for group in parameter_groups(model, lr=0.0):
        number = sum(each.numel() for each in group["params"])
        make = functools.partial(instantiate, cfg.optimizer)
        trained += number
        states += number * bytes_of_states(make, DTYPES[cfg.master_dtype], group["in_blocks"])
    return trained, states


def _powers(number: int, most: int) -> list[int]:
    """The powers of 2 that divide a number, up to another."""
    return [2**n for n in range(most.bit_length()) if number % 2**n == 0]


@functools.cache
def _meshes(tp: int, cp: int, ep: int) -> dict[str, DeviceMesh]:
    """Those of the axes that are used, of processes that are not there."""
    grids = {("tp",): (tp,), ("cp", "tp"): (cp, tp), ("ep", "tp"): (ep, tp)}
    used = {names: torch.arange(math.prod(grid)).view(grid) for names, grid in grids.items() if grid[0] > 1}
    if used and not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4096)
    return {names[0]: DeviceMesh("cpu", ranks, mesh_dim_names=names) for names, ranks in used.items()}


def calibrate(run: Path, device: Device) -> Device:
    """The device as it was in `run`, which is written there: with the speed, and the memory that is not for tensors, at
    which it takes what was measured; of a CPU with the cores of this machine. Raises TuneError."""
    files = {name: run / name for name in ("run.json", "config.yaml", "metrics.jsonl")}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise TuneError(f"--calibrate: {run} has no {' and no '.join(missing)}: it is not the folder of a run")
    lines = [json.loads(line) for line in files["metrics.jsonl"].read_text(encoding="utf-8").splitlines()]
    steps = [each for each in lines if "step_seconds" in each][1:]  # the first one warms up
    if not steps:
        raise TuneError(f"--calibrate: {run} has not two steps to measure")
    cfg = cast(DictConfig, OmegaConf.load(files["config.yaml"]))
    if "group_size" in cfg:
        raise TuneError("--calibrate: what a run samples is of any length. Take a run of full_finetune")
    rows = cfg.global_batch_size * full_rows(cfg, 1).num_tokens / cfg.max_seq_len
    cfg.max_seq_len = round(median(each["tokens"] for each in steps) / rows)
    device = replace(device, cores=os.cpu_count() or 1) if device.is_host else device
    job = Job(cfg, device, json.loads(files["run.json"].read_text(encoding="utf-8"))["processes"])
    plan = job.plan(job.layout())
    measured = median(each["step_seconds"] - each["data_seconds"] for each in steps)
    waits = sum(plan.seconds[name] for name in ("tensor", "sharding", "offload"))
    speed = (plan.step_seconds - plan.seconds["input"] - waits) / max(measured - waits, 0.1 * measured)
    tensors = (plan.peak - plan.memory["reserve"]) / GIB
    reserve = max(0.0, max(each["peak_memory_gib"] for each in steps) - (1 + device.reserve_share) * tensors)
    found = replace(device.at_speed(speed), reserve=reserve)
    (run / "device.json").write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    return found
