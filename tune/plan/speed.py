"""Seconds of a step: computation by the roofline of each operation, plus communication that is not hidden."""

from tune.devices import Device
from tune.plan.memory import Layout, PlannedStage
from tune.plan.trace import REDUCED, Interval, Unit


def seconds(
    stage: PlannedStage, layout: Layout, states: float, plain: bool, device: Device, hop: float
) -> dict[str, float]:
    """Return the seconds of an optimizer step, by part.

    Computation is `products` (bound by matrix products) and `memory` (bound by memory). `tensor` is the collectives of
    tp, cp and ep, which computation waits for; `sharding` is FSDP's communication that computation does not hide;
    `optimizer` is the update; `pipeline` is waiting for other stages. A stage receives and sends `hop` bytes per
    micro-batch.

    FSDP gathers the next block and reduces the last block's gradients while a block computes. Only the longer of the
    two counts; on a CPU both count. The first gather and the last reduction are never hidden.
    """
    trace = stage.trace
    shards = 1 if plain else layout.shards
    span = layout.tp * shards  # neighbors in the mesh share a node first

    def gather(unit: Unit) -> float:
        return device.transfer(unit.gathered, span) if shards > 1 else 0.0

    def reduce(unit: Unit) -> float:
        if plain or not unit.trained:
            return 0.0
        within = device.transfer(unit.reduced, span) if shards > 1 else 0.0
        beyond = 2 * unit.trained * REDUCED / shards
        return within + (device.transfer(beyond, layout.size) if layout.dp_replicate > 1 else 0.0)

    times = layout.micro_batches
    every, gathers = layout.reductions, 1 if layout.units_stay_gathered else times
    sharding = sum(gathers * gather(unit) + every * reduce(unit) for unit in trace.others)
    parts = [(trace.embed, 1), (trace.loss, 1), (trace.rest, 1)]
    for count, unit, *intervals in trace.blocks:
        parts += [(each, count) for each in intervals]
        forward, backward = (each.compute + each.exchange for each in intervals)
        again = gather(unit) if backward and not layout.units_stay_gathered else 0.0
        if device.is_host:  # the computing cores also move the bytes
            forward = backward = 0.0
        sharding += count * gathers * max(0.0, gather(unit) - forward)
        sharding += count * every * max(0.0, again + reduce(unit) - backward)
        sharding += count * (times - every) * max(0.0, again - backward)
    busy = {name: times * sum(n * getattr(each, name) for each, n in parts) for name in Interval._fields}
    whole = trace.whole
    updated = (2 * (whole.master + whole.trained * states) + whole.master) / layout.shards
    # If processes share cores, others compute while a stage waits.
    waits = max(0.0, (1 + (layout.pp - 1) / times) / device.crowd - 1) * (busy["compute"] + busy["exchange"])
    sends = 2 * times * device.transfer(2 * hop, 2, layout.size) if layout.pp > 1 else 0.0  # each of two gets all
    speed = (device.host if layout.cpu_offload else device.bandwidth * device.bandwidth_share) * 1e9
    moved = 2 * trace.saved * times if layout.activation_offload else 0.0
    moved += 2 * whole.gathered / layout.shards * times if layout.cpu_offload else 0.0
    return {
        "products": busy["products"],
        "memory": busy["compute"] - busy["products"],
        "tensor": busy["exchange"],
        "sharding": sharding,
        "pipeline": waits + sends,
        "optimizer": updated / speed,
        "offload": max(0.0, moved / (device.host * 1e9) - busy["compute"]),
    }
