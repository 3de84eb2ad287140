"""Memory and speed of a job in a layout, and the fastest layout that fits."""

import copy
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast, get_args

from omegaconf import DictConfig, OmegaConf
from torch import nn

from tune.config import flat
from tune.datasets import beyond_positions, require_batches
from tune.devices import Device
from tune.distributed import LARGE, as_dtype, cast_by_fsdp, repeated_blocks, split_blocks
from tune.errors import TuneError
from tune.files import written_aside
from tune.parts import language_of
from tune.plan.memory import GIB, IN_STEP, PARTS, Checkpointing, Layout, PlannedStage, memory
from tune.plan.recording import Recording, is_trained, meshes_of, require_layout
from tune.plan.sampling import read_prompts, read_together, sample_token
from tune.plan.speed import seconds
from tune.plan.trace import Sharing, StepTrace, Trace, Tracer
from tune.run import flops_per_token, planned_memory
from tune.run_settings import escaped, listed_only, read_settings, settings_file
from tune.types import as_given

T = TypeVar("T")

# Settings of a layout that a search chooses.
CHOSEN = (
    *(f"parallel.{axis}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp", "zero_stage")),
    "micro_batch_size",
    *("compute.activation_checkpointing", "compute.activation_offload", "compute.cpu_offload"),
)
INPUT = 7e-8  # seconds of a core for a token of a batch: 60 to 90 ns, in rows of 1,000 tokens and in packed ones
LEAST_TOKENS = 4096  # tokens of a row per device of cp; below, gathering keys costs more time than cp saves
IN_STEPS = tuple(key for key in CHOSEN if "parallel." not in key)
KEPT = ("parallel.pp_schedule", "parallel.reduce_every_micro_batch")


@dataclass(frozen=True)
class Plan:
    """The plan of a step with `tokens` tokens of `flops` each, without recomputation.

    `memory` is bytes by part at the peak `moment`, `host` the bytes in host memory, and `seconds` the time by cause.
    """

    layout: Layout
    device: Device
    moment: str
    memory: dict[str, float]
    host: float
    seconds: dict[str, float]
    tokens: int
    flops: float
    chosen: tuple[str, ...] = CHOSEN  # keys that the recipe has

    @property
    def peak(self) -> float:
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The larger of the shares that it needs of the device's memory and of the host's."""
        return max(self.peak / (self.device.memory * GIB), self.host / (self.device.host_memory * GIB))

    @property
    def fits(self) -> bool:
        return self.share <= 1

    @property
    def settings(self) -> dict[str, Any]:
        """The layout's settings."""
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
            "mfu": speed * self.flops / (self.device.fastest * 1e12),
            "bottleneck": max(self.seconds, key=lambda name: self.seconds[name]),
        }


def _field(key: str) -> str:
    return key.rpartition(".")[2]


class Job:
    """A training run of a recipe with these settings, on `processes` devices. The data need not exist: all rows and
    completions have their maximum length.

    Raises:
        TuneError: the recipe raises it, or does not train.
    """

    def __init__(self, cfg: DictConfig, device: Device, processes: int, recipe: Path):
        device = device.shared_by(processes)
        self.cfg, self.device, self.processes, self.recipe = cfg, device, processes, recipe
        recorded = self.recorded = Recording(recipe, cfg, device)
        self.axes, self.subjects = recorded.axes, recorded.subjects
        self.trained = [number for number, subject in enumerate(self.subjects) if is_trained(subject.model)]
        if not self.trained or recorded.batch is None:
            raise TuneError(f"plan: {recipe.name} trains no model that was given to parallelize: only that is planned")
        models = [recorded.models[number] for number in self.trained]
        self.how = recorded.how[self.trained[0]]
        self.dtype, master_dtype = self.how["dtype"], self.how["master_dtype"]
        self.cost = getattr(models[0], "cost", "")  # of a model that transformers computes
        self.hidden = getattr(getattr(models[0], "config", None), "hidden_size", 0)
        self.max_steps, self.rows, self.prompts = recorded.max_steps, recorded.global_batch_size, recorded.items
        documents = recorded.batch.documents.lengths
        self.note = beyond_positions(models[0], max(documents))
        # Also of the mismatched answer that comes with a labelled one.
        if not recorded.first_rows:
            raise TuneError(
                f"plan: {recipe.name} makes its batches itself, and tune plan only chooses the rows of "
                "datasets.DataLoader"
            )
        self.row_tokens = recorded.batch.num_tokens // recorded.first_rows
        length = recorded.batch.num_tokens // len(documents)
        self.flops = sum(flops_per_token(model, length) for model in models)
        self.casts = any(cast_by_fsdp(model, self.dtype, master_dtype) for model in models)
        kept = sum(planned_memory(model, self.dtype, master_dtype, shards=1)["gradients"] for model in models)
        states = sum(recorded.states[number] for number in self.trained)
        trained = sum(
            parameter.numel() for model in models for parameter in model.parameters() if parameter.requires_grad
        )
        self.states = states / max(1, trained)
        self.checkpoint_gib = kept + states / GIB  # gradients are like the weights
        self.copies = ""
        if (checkpointer := recorded.checkpointer) and checkpointer.asynchronous:
            every, last = checkpointer.every, recorded.max_steps
            self.copies = "beside" if every and not (last and last <= every) else "end"
        # Keys: rows, sizes of (tp, cp, ep), checkpointing, whether FSDP has nothing to do for trained models and for
        # frozen ones, and whether gradients accumulate.
        self.trace = functools.cache(self._trace)
        self.once = functools.cache(self._once)
        self.layers = len(repeated_blocks(models[0]))
        self.experts = max(getattr(module, "num_experts", 1) for model in models for module in model.modules())
        self.blocks = functools.cache(functools.partial(split_blocks, models[0], length=max(documents)))
        self.keys = self._keys()
        self.chosen = tuple(self.keys.values())

    def _keys(self) -> dict[str, str]:
        """Return the recipe's keys for the settings of a layout, by name."""
        known, keys = [*flat(cast(Any, OmegaConf.to_container(self.cfg)))], dict[str, str]()
        for key in CHOSEN:
            name = _field(key)
            renamed = [other for other in known if other.endswith(f".{name}")]  # the group may have another name
            if "parallel." in key and name not in self.axes:
                continue
            if key in known:
                keys[name] = key
            elif len(renamed) == 1:
                keys[name] = renamed[0]
        return keys

    def _given(self, names: Iterable[str]) -> Layout:
        """Return the layout in the recipe's settings."""
        given: dict[str, Any] = {"micro_batch_size": self.recorded.micro_batch_size}
        given |= self.axes | self.how
        return Layout(**{name: given[name] for name in names if given.get(name) is not None})

    def _trace(
        self, rows: int, axes: tuple[int, int, int], checkpointing: Any, plain: bool, accumulates: bool,
        alone: bool = True,
    ) -> StepTrace:  # fmt: skip
        """Trace a micro-batch of `rows` rows."""
        tracer = self._tracer(axes, checkpointing, plain, alone)
        with self.recorded.replayed():
            return tracer.step(lambda: self.recorded.loss(rows), 1 + accumulates)

    def _tracer(self, axes: tuple[int, int, int], checkpointing: Any, plain: bool, alone: bool) -> Tracer:
        plan, loss_parallel = self.axes.get("plan"), self.axes.get("loss_parallel", True)
        sharing = Sharing(meshes_of(*axes), plan, loss_parallel, checkpointing, plain, alone)
        return Tracer(self.subjects, sharing, self.device, self.recorded.weights)

    def _once(self, kind: str, number: int, rows: int, axes: tuple[int, int, int], plain: bool) -> Trace:
        """Trace a single forward: a lone one, or the prompts or the last token of a sampling."""
        if kind == "lone":
            lone = self.recorded.lone_forwards[number]
            batch = self.recorded.batch_of(lone, rows)
            tracer = self._tracer(axes, "none", plain, plain)
            return tracer.forward(lone.number, lambda model: lone.call(model, batch))
        sampling = self.recorded.samplings[number]
        sampler, length = sampling.sampler, sampling.longest
        subject = self.subjects[sampling.number]
        frozen = copy.deepcopy(subject.model).requires_grad_(False).eval()
        device = self.device if self.device.is_host else replace(self.device, launch=self.device.launch / 2)
        sharing = Sharing(meshes_of(*axes), loss_parallel=self.axes.get("loss_parallel", True), alone=plain)
        subjects = [subject._replace(model=frozen, compiled=False)]
        tracer = Tracer(subjects, sharing, device, self.recorded.weights)  # a GPU replays a captured graph
        if kind == "prompts":
            prompts = math.ceil(rows * sampling.different / sampling.prompts)
            return tracer.forward(0, lambda model: read_prompts(sampler, model, rows, prompts, length))
        return tracer.forward(0, lambda model: sample_token(sampler, model, rows, length))

    def _lone(self, number: int, axes: tuple[int, int, int], plain: bool, rows: int) -> Trace:
        return self.once("lone", number, rows, axes, plain)

    def layout(self) -> Layout:
        """Return the layout of the settings."""
        layout = self._given(_field(key) for key in (*CHOSEN, *KEPT))
        shards = layout.dp_shard
        if cast(Any, shards) == "auto" or "dp_shard" not in self.axes:
            layout = replace(
                layout, dp_shard=self.processes // (layout.dp_replicate * layout.cp * layout.tp * layout.pp)
            )
        if layout.pp_schedule not in ("1f1b", "gpipe"):
            raise TuneError(f"parallel.pp_schedule: tune plan does not support {layout.pp_schedule}. Set 1f1b or gpipe")
        if layout.zero_stage == 0:
            layout = replace(layout, dp_replicate=layout.data, dp_shard=1)
        if layout.size != self.processes:
            raise TuneError(
                f"parallel: dp_replicate={layout.dp_replicate} x dp_shard={shards} x cp={layout.cp} "
                f"x tp={layout.tp} x pp={layout.pp} does not equal --world-size {self.processes}"
            )
        if layout.shards % layout.ep:
            raise TuneError(f"parallel.ep: {layout.ep} does not divide dp_shard x cp ({layout.shards})")
        return layout

    def plan(self, layout: Layout, line: bool = False) -> Plan:
        """Return the plan of a layout. With `line`, extrapolate linearly from traces of one and two rows, or of one and
        two groups of rows that share a prompt."""
        micro, group = layout.micro_batch_size, self.rows // self.prompts if self.prompts else 1
        if self.prompts:
            mine = -(-self.prompts // layout.data) * group
        else:
            require_batches(self.rows, micro, layout.data, layout.pp)
            mine = self.rows // layout.data
        layout = replace(layout, micro_batches=-(-mine // micro))
        plain = layout.size == 1 and not self.casts and not layout.cpu_offload  # as in `parallelize`
        key = (
            (layout.tp, layout.cp, layout.ep), layout.activation_checkpointing, plain,
            plain and layout.micro_batches > 1, layout.size == 1,
        )  # fmt: skip
        unit = group if micro > group else 1

        def traced(trace: Callable[[int], T]) -> T:
            if line and micro > 2 * unit:
                return cast(Any, trace(unit)).scaled(trace(2 * unit), -(-micro // unit))
            return trace(micro)

        step = traced(lambda rows: self.trace(rows, *key))
        hop = micro * self.row_tokens * self.hidden * as_dtype(self.dtype).itemsize / layout.cp
        if layout.pp > 1 and len(step.trained.blocks) > len(self.subjects[self.trained[0]].kinds):
            raise TuneError(
                "parallel.pp: tune plan does not support stages in a step with several forwards. Set it to 1"
            )
        stages = self._stages(step.trained, layout, hop) if layout.pp > 1 else [PlannedStage(step.trained)]
        hop = hop if layout.pp > 1 else 0.0
        spent = [seconds(stage, layout, self.states, plain, self.device, hop) for stage in stages]
        longest = max(spent, key=lambda taken: sum(taken.values()))
        longest = {name: self.recorded.updates * value for name, value in longest.items()}
        others = self._others(step, layout, hop, traced)
        for name, value in others.seconds.items():
            longest[name] += value
        fixed = self.states, plain, self.device, self.copies, others.frozen, others.in_head
        needed = [*others.moments, *(memory(stage, layout, *fixed) for stage in stages)]
        held = self._held(step.trained, layout, others.frozen)
        if others.beside:
            needed.append(self._moment("forward without gradients", held, {"activations": others.beside}))
        if self.recorded.samplings:
            longest["rollout"] = 0.0
        for number in range(len(self.recorded.samplings)):
            sizes, more = self._sampled(number, step, layout, plain)
            longest["rollout"] += more
            needed.append(self._moment("rollout", self._held(step.trained, layout, others.frozen, False), sizes))
        # A thread assembles the next batch during the step.
        longest["input"] = max(0.0, mine * self.row_tokens * INPUT - sum(longest.values()))
        moment, parts, _ = max(needed, key=lambda moment: sum(moment[1].values()))
        return Plan(
            layout, self.device, moment, parts, max(host for *_, host in needed), longest,
            self.rows * self.row_tokens, self.flops, self.chosen,
        )  # fmt: skip

    def _held(self, trained: Trace, layout: Layout, frozen: float, has_gradients: bool = True) -> dict[str, float]:
        """Return the bytes by part that are held between the forwards of a step."""
        whole, shards = trained.whole, layout.shards
        copied = whole.master + whole.trained * self.states if self.copies == "beside" and self.device.is_host else 0.0
        held = {
            "weights": whole.stored / shards,
            "gradients": whole.master / shards if has_gradients and layout.micro_batches > 1 else 0.0,
            "optimizer": whole.trained * self.states / shards,
            "frozen": frozen,
            "checkpoint": copied / shards,
        }
        if layout.cpu_offload:
            held |= {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
        return dict.fromkeys(PARTS, 0.0) | held

    def _moment(self, name: str, held: dict[str, float], more: dict[str, float]) -> tuple[str, dict[str, float], float]:
        """Return a moment with `more` bytes than the held ones."""
        sizes = held | {part: held[part] + size for part, size in more.items()}
        reserve = self.device.reserve * GIB + self.device.reserve_share * sum(sizes.values())
        return name, sizes | {"reserve": reserve}, 0.0

    def _others(
        self, step: StepTrace, layout: Layout, hop: float, traced: Callable[[Callable[[int], Trace]], Trace]
    ) -> "Others":
        """Return the cost of forwards without gradients, and of frozen models that stay in memory.

        `traced` returns the trace of a micro-batch from a function of its rows.
        """
        alone, is_one = replace(layout, cpu_offload=False), layout.size == 1
        others = Others({}, [])
        axes = layout.tp, layout.cp, layout.ep
        gathered = step.wholes if layout.units_stay_gathered else step.roots
        stays = {
            number: gathered[number].gathered
            for number in range(len(self.subjects))
            if number not in self.trained and self.recorded.stays[number]
        }
        others.frozen = sum(step.wholes[number].stored / layout.shards + size for number, size in stays.items())
        for forward in step.forwards:
            given = PlannedStage(forward.trace), alone, 0.0, is_one, self.device
            again = sum(other.number == forward.number for other in step.forwards)
            times = self.recorded.forwards[forward.number] / again
            for name, value in seconds(*given, hop).items():
                others.seconds[name] = others.seconds.get(name, 0.0) + times * value
            _, parts, _ = memory(*given)
            extra = sum(parts[name] for name in IN_STEP) - stays.get(forward.number, 0.0)
            if forward.is_within:
                others.in_head = max(others.in_head, extra)
            else:
                others.beside = max(others.beside, extra)
        for number, lone in enumerate(self.recorded.lone_forwards):
            trace = traced(functools.partial(self._lone, number, axes, is_one))
            beside = step.trained.whole.stored / layout.shards if lone.is_beside else 0.0
            _, parts, host = memory(PlannedStage(trace), alone, 0.0, is_one, self.device, frozen=beside)
            if not lone.in_step:
                others.moments.append(("before the first step", parts, host))
            else:
                extra = sum(parts[name] for name in IN_STEP) - stays.get(lone.number, 0.0)
                others.beside = max(others.beside, extra)
        return others

    def _sampled(self, number: int, step: StepTrace, layout: Layout, plain: bool) -> tuple[dict[str, float], float]:
        """Return bytes by part and seconds for sampling a step's completions, all of maximum length."""
        sampling, axes = self.recorded.samplings[number], (layout.tp, layout.cp, layout.ep)
        sampler, share = sampling.sampler, sampling.prompts / sampling.different
        if self.prompts:  # of all prompts of a step
            prompts = -(-sampling.different // layout.data)
            samples = round(prompts * share)
        else:  # of a micro-batch
            samples = -(-sampling.prompts * self.rows // (self.recorded.first_rows * layout.data))
            prompts = samples
        rows = min(sampler.max_rows, samples)
        read = self.once("prompts", number, rows, axes, plain)
        sampled = self.once("token", number, rows, axes, plain)
        together = read_together(-(-rows * prompts // samples), sampling.longest)
        forwards = (read, -(-prompts // together)), (sampled, -(-samples // rows) * sampler.max_new_tokens)
        spent = self.device.transfer(read.whole.gathered, layout.tp * layout.shards) if layout.shards > 1 else 0.0
        for trace, times in forwards:
            parts = [(trace.embed, 1), (trace.loss, 1), *((kind.forward, kind.number) for kind in trace.blocks)]
            spent += times * sum(count * (interval.compute + interval.exchange) for interval, count in parts)
        in_blocks = [kind.forward.extra - kind.forward.live for trace, _ in forwards for kind in trace.blocks]
        above = max(*in_blocks, read.loss.extra, sampled.loss.extra)
        sizes = {
            "activations": read.embed.live + read.saved + above,
            "communication": read.whole.gathered,
            "weights": self._packed(self.recorded.models[sampling.number]) / layout.tp,
        }
        return sizes, spent

    def _packed(self, model: Any) -> float:
        """Return the bytes of weight copies in the layout of CPU kernels, which exist while sampling."""
        tables = [module.weight for module in language_of(model).modules() if isinstance(module, nn.Embedding)]
        looked_up = [] if getattr(model, "head", None) is None else tables
        of_products = {*model.parameters()}.difference(looked_up)
        large = sum(weight.numel() for weight in of_products if weight.dim() == 2 and weight.numel() >= LARGE)
        return large * as_dtype(self.dtype).itemsize * self.device.is_host

    def _stages(self, whole: Trace, layout: Layout, hop: float) -> list[PlannedStage]:
        """Return the stages that differ. A stage keeps sent tensors until as many others have followed."""
        stages, different = self.blocks(layout.pp), dict[Any, PlannedStage]()
        places_of = self.subjects[self.trained[0]].kinds
        for number, blocks in enumerate(stages):
            behind, ends = layout.pp - 1 - number, (number == 0, number == layout.pp - 1)
            held = min(behind + 1, layout.micro_batches) if layout.pp_schedule == "1f1b" else layout.micro_batches
            kinds = [len({*places} & {*blocks}) for _, places in places_of]
            sent = (2 - sum(ends)) * min(layout.pp, layout.micro_batches) * hop
            different.setdefault(
                (*ends, *kinds), PlannedStage(whole.stage(kinds, *ends), held, sent)
            )  # the first one holds most
        return list(different.values())

    def require(self, layout: Layout) -> None:
        """Run the recipe in this layout until it shards a model. Raises the recipe's TuneError."""
        cfg = copy.deepcopy(self.cfg)
        for name, key in self.keys.items():
            OmegaConf.update(cfg, key, getattr(layout, name))
        require_layout(self.recipe, cfg, self.processes)

    def search(self) -> list[Plan]:
        """Return all layouts: fitting ones, fastest first, then the others, smallest first (docs/planning.md)."""
        plans: list[Plan] = []
        for axes in self._axes():
            try:
                plans += self._plans(*axes)
            except TuneError as error:
                if axes == (1, 1, 1, 1) or not str(error).startswith("parallel."):
                    raise
        if not plans:
            rows, size = self.rows, self.processes
            good = " or ".join(str(fits) for fits in (rows // size * size, -(-rows // size) * size) if fits)
            raise TuneError(
                f"global_batch_size={rows} cannot be divided over {size} processes, even with powers of 2 for "
                f"parallel.tp, cp and pp. Set it to {good}"
            )

        def rank(plan: Plan) -> tuple[bool, float]:
            return not plan.fits, plan.step_seconds if plan.fits else plan.peak

        while (plans := sorted(plans, key=rank))[0] != (exact := self.plan(plans[0].layout)):
            plans[0] = exact  # it was extrapolated from fewer rows
        self.require(plans[0].layout)
        return plans

    def _axes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield sizes of tp, cp, ep and pp, the simplest first."""
        node = self.device.per_node
        sizes = {
            "pp": self.layers if "pp" in self.keys and self.axes.get("pp_schedule") in ("1f1b", "gpipe") else 1,
            "cp": max(1, self.row_tokens // LEAST_TOKENS),
            "ep": min(node, self.experts),
            "tp": min(node, 8),
        }
        sizes = {axis: most if axis in self.keys else 1 for axis, most in sizes.items()}
        for pp, cp, ep, tp in itertools.product(*(_powers(0, most) for most in sizes.values())):
            rest = self.processes // (tp * cp * pp)
            if rest * tp * cp * pp == self.processes and rest * cp % ep == 0:
                yield tp, cp, ep, pp

    def _plans(self, tp: int, cp: int, ep: int, pp: int) -> Iterator[Plan]:
        data = self.processes // (tp * cp * pp)
        given = self._given(_field(key) for key in (*KEPT, *IN_STEPS) if _field(key) not in self.keys)
        rows = self.rows // data if self.rows % data == 0 else 0
        first = replace(given, tp=tp, cp=cp, ep=ep, pp=pp)
        micros = _powers(rows, rows // pp) if "micro_batch_size" in self.keys else [given.micro_batch_size]
        all_copies = [copies for copies in _powers(data, data) if data // copies * cp % ep == 0] if rows else []
        for way in self._ways(first):
            for copies in all_copies:
                for micro in micros[: 1 if cp > 1 else None]:
                    layout = replace(way, dp_replicate=copies, dp_shard=data // copies, micro_batch_size=micro)
                    plan = self.plan(layout, line=True)
                    yield plan
                    if not plan.fits:
                        break
                    if "zero_stage" in self.keys and layout.shards > 1 and pp == 1:
                        yield from (self.plan(replace(layout, zero_stage=stage), line=True) for stage in (2, 1))
                if not plan.fits and micro == micros[0]:
                    break

    def _ways(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layout with each way to keep activations, and to offload them or the weights."""
        offloads: list[dict[str, Any]] = [{}]
        if layout.pp == 1 and not self.device.is_host:
            offloads += [{name: True} for name in ("activation_offload", "cpu_offload") if name in self.keys]
        ways = get_args(Checkpointing) if "activation_checkpointing" in self.keys else [layout.activation_checkpointing]
        for checkpointing, offload in itertools.product(ways, offloads):
            if checkpointing == "selective" and "activation_offload" in offload and self.how["compile"] is not True:
                continue  # see tune.rules.combinations
            yield replace(layout, activation_checkpointing=checkpointing, **offload)

    def layouts_of_one_row(self, is_searched: bool) -> list[Layout]:
        """Return the layouts with one row in a micro-batch: the given axes, or all axes if `is_searched`, with each way
        to keep and offload activations."""
        given = [self.layout()]
        if is_searched:
            kept = self._given(_field(key) for key in (*KEPT, *IN_STEPS) if _field(key) not in self.keys)
            given = [
                replace(kept, dp_shard=self.processes // (tp * cp * pp), cp=cp, tp=tp, ep=ep, pp=pp)
                for tp, cp, ep, pp in self._axes()
                if self.rows % (self.processes // (tp * cp * pp)) == 0
            ]
        given = [replace(layout, micro_batch_size=1, activation_offload=False, cpu_offload=False) for layout in given]
        return [way for layout in given for way in self._ways(layout)]


@dataclass
class Others:
    """The cost of forwards without gradients: seconds in a step, moments before it, bytes of frozen models that stay,
    and bytes of activations within the head or outside the trained model's forwards."""

    seconds: dict[str, float]
    moments: list[tuple[str, dict[str, float], float]]
    frozen: float = 0.0
    in_head: float = 0.0
    beside: float = 0.0


def _powers(number: int, most: int) -> list[int]:
    """Return the powers of 2 up to `most` that divide `number`."""
    return [2**n for n in range(most.bit_length()) if number % 2**n == 0]


def calibrate(run: Path, device: Device, recipe: Path, own: Mapping[str, Any] | None = None) -> Device:
    """Fit the device's speed and reserved memory to the measurements in `run` of `recipe`, and write them there.

    A CPU gets the cores of this machine. `own` are settings of the user, whose components the run's settings may name
    too. Raises TuneError.
    """
    files = {name: run / name for name in ("run.json", "config.yaml", "metrics.jsonl")}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise TuneError(f"--calibrate: {run} is not a run folder: it has no {' and no '.join(missing)}")
    lines = [json.loads(line) for line in files["metrics.jsonl"].read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "step_seconds" in line][1:]  # the first step is a warm-up
    if not steps:
        raise TuneError(f"--calibrate: {run} has fewer than two steps to measure")
    file = settings_file(run) or files["config.yaml"]
    settings = read_settings(file)
    cfg = OmegaConf.create(escaped(settings))
    device = replace(device, cores=os.cpu_count() or 1) if device.is_host else device
    processes = json.loads(files["run.json"].read_text(encoding="utf-8"))["processes"]
    with listed_only(settings, file, own):
        job = Job(cfg, device, processes, recipe)
        if job.recorded.samplings or "max_seq_len" not in cfg:
            raise TuneError("--calibrate: sampled completions vary in length. Use a run of full_finetune")
        mean = median(step["tokens"] for step in steps)
        cfg.max_seq_len = round(cfg.max_seq_len * mean / (job.rows * job.row_tokens))
        job = Job(cfg, device, processes, recipe)
        plan = job.plan(job.layout())
    measured = median(step["step_seconds"] - step["data_seconds"] for step in steps)
    waits = sum(plan.seconds[name] for name in ("tensor", "sharding", "offload"))
    speed = (plan.step_seconds - plan.seconds["input"] - waits) / max(measured - waits, 0.1 * measured)
    tensors = (plan.peak - plan.memory["reserve"]) / GIB
    reserve = max(0.0, max(step["peak_memory_gib"] for step in steps) - (1 + device.reserve_share) * tensors)
    as_measured = replace(device.at_speed(speed), reserve=reserve)
    with written_aside(run / "device.json") as unfinished:  # the file there may be a link to another one
        unfinished.write_text(json.dumps(asdict(as_measured), indent=2) + "\n", encoding="utf-8")
    return as_measured
