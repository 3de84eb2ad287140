"""Seconds of a step: computation by the roofline of each operation, and what communication adds."""

from dataclasses import dataclass

from tune.preflight.devices import Device
from tune.preflight.memory import REDUCED, Layout, units
from tune.preflight.trace import Interval, Trace, Unit


@dataclass(frozen=True)
class Seconds:
    """Of an optimizer step: `products` and `memory` (operations by what bounds them) are those of computation; `tensor`
    are collectives that it waits for, `sharding` those of FSDP that it does not hide, `optimizer` the update."""

    products: float
    memory: float
    tensor: float
    sharding: float
    optimizer: float
    offload: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def seconds(trace: Trace, layout: Layout, states: float, plain: bool, device: Device) -> Seconds:
    """FSDP's gathering of the next block, and its reduction of the last one's gradients, go on beside computation: of
    each block only counts what takes longer. The first gathering and the last reduction are always waited for."""
    shards = 1 if plain else layout.dp_shard
    span = layout.tp * shards  # neighbours in the mesh share a node first

    def gather(unit: Unit) -> float:
        return device.transfer(unit.gathered, span) if shards > 1 else 0.0

    def reduce(unit: Unit) -> float:
        if plain or not unit.trained:
            return 0.0
        within = device.transfer(unit.trained * REDUCED, span) if shards > 1 else 0.0
        beyond = 2 * unit.trained * REDUCED / shards
        return within + (device.transfer(beyond, layout.size) if layout.dp_replicate > 1 else 0.0)

    every = layout.micro_batches if layout.reduce_every_micro_batch else 1
    hidden = 0.0
    for kind, (unit, count) in enumerate(zip(trace.blocks, trace.counts, strict=True)):
        forward, backward = _busy(trace.forward[kind]), _busy(trace.backward[kind])
        hidden += count * layout.micro_batches * max(0.0, gather(unit) - forward)
        hidden += count * every * max(0.0, gather(unit) + reduce(unit) - backward)
        hidden += count * (layout.micro_batches - every) * max(0.0, gather(unit) - backward)
    exposed = sum(layout.micro_batches * gather(unit) + every * reduce(unit) for unit in trace.others)

    parts = [(trace.embed, 1), (trace.loss, 1), (trace.rest, 1)]
    parts += [(each, n) for each, n in zip(trace.forward, trace.counts, strict=True)]
    parts += [(each, n) for each, n in zip(trace.backward, trace.counts, strict=True)]
    products, compute, exchange = (
        layout.micro_batches * sum(count * getattr(each, name) for each, count in parts)
        for name in ("products", "compute", "exchange")
    )
    whole = units(trace)
    updated = (2 * (whole.master + whole.trained * states) + whole.master) / layout.dp_shard
    speed = (device.host if layout.cpu_offload else device.bandwidth * device.bandwidth_share) * 1e9
    saved = sum(count * each.live for count, each in zip(trace.counts, trace.forward, strict=True))
    moved = 2 * saved * layout.micro_batches if layout.activation_offload else 0.0
    moved += 2 * whole.gathered / layout.dp_shard * layout.micro_batches if layout.cpu_offload else 0.0
    offload = max(0.0, moved / (device.host * 1e9) - compute)
    return Seconds(products, compute - products, exchange, hidden + exposed, updated / speed, offload)


def _busy(interval: Interval) -> float:
    return interval.compute + interval.exchange
