"""Memory of a process over a step, by part, from the trace of a shortened model: live bytes at each moment."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tune.devices import Device
from tune.plan.trace import REDUCED, Trace, Unit

GIB = 2**30
Checkpointing = Literal["none", "selective", "full"]
IN_STEP = ("activations", "head_and_loss", "communication")
PARTS = ("weights", "gradients", "optimizer", *IN_STEP, "frozen", "checkpoint", "reserve")


@dataclass(frozen=True)
class Layout:
    """The layout of a step, in terms of the settings; `micro_batches` counts those of one process."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    zero_stage: Literal[0, 1, 2, 3] | None = None
    pp_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    micro_batch_size: int = 1
    activation_checkpointing: Checkpointing = "none"
    activation_offload: bool = False
    cpu_offload: bool = False
    reduce_every_micro_batch: bool = True
    micro_batches: int = 1

    @property
    def data(self) -> int:
        """Number of processes that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Number of processes that FSDP shards over."""
        return self.dp_shard * self.cp

    @property
    def units_stay_gathered(self) -> bool:
        """Same as in `tune.distributed.World`."""
        return self.pp > 1 or self.zero_stage in (1, 2)

    @property
    def reductions(self) -> int:
        """Number of gradient reductions in a step."""
        return self.micro_batches if self.reduce_every_micro_batch and self.zero_stage != 1 else 1

    @property
    def size(self) -> int:
        return self.data * self.cp * self.tp * self.pp

    def throughout(self, trace: Trace) -> float:
        """Return the bytes that FSDP gathers once: the root unit, or all units."""
        return trace.whole.gathered if self.units_stay_gathered else trace.others[-1].gathered


class PlannedStage(NamedTuple):
    """A pipeline stage, or the whole model without a pipeline: the trace of a micro-batch, the number of micro-batches
    held between forward and backward, and the bytes on their way to other stages."""

    trace: Trace
    held: int = 1
    sent: float = 0.0


def memory(
    stage: PlannedStage, layout: Layout, states: float, plain: bool, device: Device, copies: str = "",
    frozen: float = 0.0, in_head: float = 0.0,
) -> tuple[str, dict[str, float], float]:  # fmt: skip
    """Return the moment of peak memory in a step (not the first one), its bytes by part, and the bytes in host memory.

    `states` are the optimizer's bytes per trained parameter. With `copies`, a checkpoint is written from a copy of
    trained parameters and states: only at the "end" of the run, or also "beside" later steps. A frozen model takes
    `frozen` bytes throughout, and `in_head` more bytes while it computes, which is before the head.
    """
    trace, whole, shards = stage.trace, stage.trace.whole, layout.shards
    gradients = whole.master / shards if layout.micro_batches > 1 else 0.0
    held = {"weights": whole.stored / shards, "gradients": gradients, "optimizer": whole.trained * states / shards}
    copy = (whole.master + whole.trained * states) / shards if copies else 0.0
    host = 0.0 if device.is_host else copy
    if layout.cpu_offload:
        host += held["weights"] + held["optimizer"] + whole.master / shards
        held = dict.fromkeys(held, 0.0)
    at_end = held["gradients"]
    if layout.reductions < layout.micro_batches and not plain:  # gradients are unsharded until the last reduction
        held["gradients"] = whole.reduced
    if layout.activation_offload:
        host += stage.held * trace.saved
    held["frozen"], moments = frozen, {}
    for name, *parts in _moments(stage, layout, plain):
        moments[name] = held | dict(zip(IN_STEP, parts, strict=False))
        moments[name]["gradients"] += parts[3]
    moments["head and loss"]["head_and_loss"] = max(trace.loss.extra, in_head)
    moments["optimizer step"]["gradients"] += at_end - held["gradients"]
    if copy and device.is_host:
        for each in moments.values():
            each["checkpoint"] = copy if copies == "beside" else 0.0
        moments["checkpoint"] = held | {"gradients": 0.0, "checkpoint": copy}
    for name in moments:
        moments[name] = dict.fromkeys(PARTS, 0.0) | moments[name]
        moments[name]["reserve"] = device.reserve * GIB + device.reserve_share * sum(moments[name].values())
    peak = max(moments, key=lambda name: sum(moments[name].values()))
    return peak, moments[peak], host


def _moments(stage: PlannedStage, layout: Layout, plain: bool) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield the moments of a step, with the live bytes in addition to weights, states and earlier gradients.

    These are activations, head and loss, communication, and gradients of this micro-batch.
    """
    trace, shards, stays = stage.trace, layout.shards, layout.units_stay_gathered
    throughout = layout.throughout(trace)
    beside = 0.0 if stays else max((each.gathered for each in trace.others[:-1]), default=0.0)
    adds = layout.micro_batches == 1 and not layout.cpu_offload
    kept = 0.0 if layout.activation_offload else trace.saved
    tail = trace.loss.live
    embedded = trace.embed.live + (stage.held - 1) * (trace.embed.live + kept + tail) + stage.sent
    everything = embedded + kept
    # FSDP keeps its last reduction until the next one, or the end of the step.
    lingers = next((each.reduced for each in reversed(trace.others) if each.reduced), trace.blocks[0].unit.reduced)
    lingers = lingers if stays and layout.micro_batches > 1 else 0.0
    several = 2 if shards > 1 else 1  # this block and the next one
    several = 0 if stays else several
    last_gathered = max(kind.unit.gathered for kind in trace.blocks) if shards > 1 and not stays else 0.0

    def gradients(unit: Unit) -> float:  # FSDP keeps fp32 reductions over copies until backward ends
        of_step, over_copies = adds * unit.master / shards, (layout.dp_replicate > 1) * REDUCED * unit.trained / shards
        return of_step if of_step == over_copies else of_step + over_copies

    of_blocks = sum(kind.number * gradients(kind.unit) for kind in trace.blocks)

    def reducing(unit: Unit) -> float:  # fp32 gradients and their result
        return unit.reduced + (unit.reduced if shards == 1 else REDUCED * unit.trained / shards)

    yield "embedding", embedded - trace.embed.live + trace.embed.extra, 0.0, throughout + lingers + 2 * beside, 0.0
    for _, unit, forward, backward in trace.blocks:
        saved = 0.0 if layout.activation_offload else forward.live
        # A forward overlaps with copying the block before to the host, a backward with copying the next one back.
        moving = forward.live - saved
        gathered = throughout + unit.gathered * several
        one = gradients(unit)
        above = max(0.0, of_blocks - one)
        yield "forward of the last block", everything - saved + forward.extra + moving, 0.0, gathered + lingers, 0.0
        yield "backward of the last block", everything + backward.extra + 2 * moving, tail, gathered + lingers, 0.0
        waiting = gathered + unit.reduced  # until the block above is reduced
        alive = everything - saved + backward.extra + 2 * moving
        yield "backward of the block before the last", alive, tail, waiting, one
        waiting += max(0.0, beside - unit.gathered) if several == 2 else 0.0  # the embedding is next
        yield "backward of the first block", embedded + forward.live + backward.extra, tail, waiting, above
        reduced = throughout + unit.gradients + reducing(unit)
        yield "reduction of the first block", embedded, tail, 0.0 if plain else reduced, above
    if layout.activation_offload:  # the last block keeps its activations until its backward
        everything += max(kind.forward.live for kind in trace.blocks)
    gathered = throughout + last_gathered + lingers  # until forward ends
    yield "head and loss", everything, trace.loss.extra, gathered, 0.0
    yield "backward of the embedding", embedded + trace.rest.extra, tail, throughout + beside, of_blocks
    last = max(trace.others, key=lambda each: each.trained)
    reduced = 0.0 if plain else throughout + last.gradients + reducing(last)
    yield "reduction of embedding and head", embedded - trace.embed.live, 0.0, reduced, of_blocks
    yield "optimizer step", 0.0, 0.0, 0.0, adds * trace.whole.master / shards
