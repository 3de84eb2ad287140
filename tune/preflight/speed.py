"""Seconds of a step: computation by the roofline of each operation, and what communication adds."""

from tune.preflight.devices import Device
from tune.preflight.memory import REDUCED, Layout
from tune.preflight.trace import Interval, Trace, Unit


def seconds(trace: Trace, layout: Layout, states: float, plain: bool, device: Device) -> dict[str, float]:
    """Of an optimizer step: `products` and `memory` (operations by what bounds them) are those of computation; `tensor`
    are collectives that it waits for, `sharding` those of FSDP that it does not hide, `optimizer` the update.

    FSDP's gathering of the next block, and its reduction of the last one's gradients, go on beside computation: of
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

    times = layout.micro_batches
    every = times if layout.reduce_every_micro_batch else 1
    sharding = sum(times * gather(unit) + every * reduce(unit) for unit in trace.others)
    parts = [(trace.embed, 1), (trace.loss, 1), (trace.rest, 1)]
    for count, unit, *intervals in trace.blocks:
        parts += [(each, count) for each in intervals]
        forward, backward = (each.compute + each.exchange for each in intervals)
        sharding += count * times * max(0.0, gather(unit) - forward)
        sharding += count * every * max(0.0, gather(unit) + reduce(unit) - backward)
        sharding += count * (times - every) * max(0.0, gather(unit) - backward)
    busy = {name: times * sum(n * getattr(each, name) for each, n in parts) for name in Interval._fields}
    whole = trace.whole
    updated = (2 * (whole.master + whole.trained * states) + whole.master) / layout.dp_shard
    speed = (device.host if layout.cpu_offload else device.bandwidth * device.bandwidth_share) * 1e9
    moved = 2 * trace.saved * times if layout.activation_offload else 0.0
    moved += 2 * whole.gathered / layout.dp_shard * times if layout.cpu_offload else 0.0
    return {
        "products": busy["products"],
        "memory": busy["compute"] - busy["products"],
        "tensor": busy["exchange"],
        "sharding": sharding,
        "optimizer": updated / speed,
        "offload": max(0.0, moved / (device.host * 1e9) - busy["compute"]),
    }
