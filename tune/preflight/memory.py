"""Memory of a process over a step, by part, from the trace of a shortened model: what is alive at each moment."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tune.preflight.devices import Device
from tune.preflight.trace import Trace, Unit

GIB = 2**30
REDUCED = 4  # bytes of a gradient while FSDP reduces it: fp32
PARTS = ("weights", "gradients", "optimizer", "activations", "head_and_loss", "communication", "reserve")


@dataclass(frozen=True)
class Layout:
    """How a step is spread: processes by axis, rows of a micro-batch, micro-batches, and what memory is saved with."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    micro_batch_size: int = 1
    micro_batches: int = 1
    checkpointing: Literal["none", "selective", "full"] = "none"
    activation_offload: bool = False
    cpu_offload: bool = False
    reduce_every_micro_batch: bool = True
    in_backward: bool = False  # the optimizer's step

    @property
    def data(self) -> int:
        """Processes that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def size(self) -> int:
        return self.data * self.tp


@dataclass(frozen=True)
class Memory:
    """Bytes by part at the moment of the peak; bytes in host memory."""

    moment: str
    parts: dict[str, float]
    host: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def units(trace: Trace) -> Unit:
    """All units of a process together."""
    total = Unit()
    for unit, count in zip((*trace.blocks, *trace.others), (*trace.counts, *[1] * len(trace.others)), strict=True):
        total = total.add(unit, count)
    return total


def memory(trace: Trace, layout: Layout, states: float, plain: bool, device: Device) -> Memory:
    """The peak of a step after the first. `states` are the optimizer's bytes for a trained parameter."""
    whole, shards = units(trace), layout.dp_shard
    gradients = whole.master / shards if layout.micro_batches > 1 else 0.0
    held = {"weights": whole.stored / shards, "gradients": gradients, "optimizer": whole.trained * states / shards}
    host = 0.0
    if not layout.reduce_every_micro_batch and layout.micro_batches > 1 and not plain:
        held["gradients"] += whole.trained * REDUCED
    if layout.cpu_offload:
        host = held["weights"] + held["optimizer"] + whole.master / shards
        held = dict.fromkeys(held, 0.0)
    saved = sum(count * each.live for count, each in zip(trace.counts, trace.forward, strict=True))
    if layout.activation_offload:
        host += saved
    moments = {}
    for name, *parts in _moments(trace, layout, plain):
        moments[name] = held | dict(zip(PARTS[3:6], parts, strict=False))
        moments[name]["gradients"] += parts[3]
        moments[name]["reserve"] = device.reserve * GIB + device.reserve_share * sum(moments[name].values())
    peak = max(moments, key=lambda name: sum(moments[name].values()))
    return Memory(peak, moments[peak], host)


def _moments(trace: Trace, layout: Layout, plain: bool) -> Iterator[tuple[str, float, float, float, float]]:
    """Moments of a step, and what is alive beside weights, states and the gradients of earlier micro-batches: in
    activations, of head and loss, for communication, in gradients of this micro-batch."""
    shards, root = layout.dp_shard, trace.others[-1]
    beside = max((each.gathered for each in trace.others[:-1]), default=0.0)
    adds = layout.micro_batches == 1 and not layout.cpu_offload and not layout.in_backward
    saved = [0.0 if layout.activation_offload else each.live for each in trace.forward]
    embedded, tail = trace.embed.live, trace.loss.live
    everything = embedded + sum(count * each for count, each in zip(trace.counts, saved, strict=True))
    of_blocks = adds * sum(n * each.master for n, each in zip(trace.counts, trace.blocks, strict=True)) / shards

    def reducing(unit: Unit) -> float:  # gradients in fp32, and the result
        return 0.0 if plain else REDUCED * unit.trained * (2 if shards == 1 else 1 + 1 / shards)

    yield "embedding", trace.embed.extra, 0.0, root.gathered + 2 * beside, 0.0
    for kind, block in enumerate(trace.blocks):
        forward, backward = trace.forward[kind], trace.backward[kind]
        gathered = root.gathered + block.gathered * (2 if shards > 1 else 1)  # the next block beside this one
        above = max(0.0, of_blocks - adds * block.master / shards)
        yield "forward of the last block", everything - saved[kind] + forward.extra, 0.0, gathered, 0.0
        yield "backward of the last block", everything + backward.extra, tail, gathered, 0.0
        waiting = gathered + (max(0.0, beside - block.gathered) if shards > 1 else 0.0)  # the embedding is the next one
        waiting += 0.0 if plain else REDUCED * block.trained  # until the block above is reduced
        yield "backward of the first block", embedded + forward.live + backward.extra, tail, waiting, above
        reduced = root.gathered + block.gradients + reducing(block)
        yield "reduction of the first block", embedded, tail, 0.0 if plain else reduced, above
    yield "head and loss", everything, trace.loss.extra, root.gathered, 0.0
    yield "backward of the embedding", embedded + trace.rest.extra, tail, root.gathered + beside, of_blocks
    last = max(trace.others, key=lambda each: each.trained)
    reduced = 0.0 if plain else root.gathered + last.gradients + reducing(last)
    yield "reduction of embedding and head", 0.0, 0.0, reduced, of_blocks
    yield "optimizer step", 0.0, 0.0, 0.0, adds * units(trace).master / shards
