"""Bytes that a process sends along each axis of a mesh."""

from typing import Any

from torch import nn

from tune.distributed.parallelize import Dtype, as_dtype, cast_by_fsdp, repeated_blocks, stored_dtype, units_of
from tune.distributed.tensor_parallel import undivided
from tune.distributed.world import World

REDUCED = 4  # bytes of a gradient element in the reduction


def bytes_sent(
    model: nn.Module,
    world: World,
    dtype: Dtype,
    master_dtype: Dtype,
    *,
    tokens: float,
    micro_batches: int,
) -> dict[str, float]:
    """Return the bytes by axis that a process sends, on average, in a step in which it computes `tokens` tokens.

    `model` is whole and on the meta device. Collectives over n processes are counted as rings: (n - 1) / n of the
    tensor for a gather or scatter, twice that for a sum. Norms, losses and fused projections are ignored.
    """
    sizes = dict(zip(world.mesh.mesh_dim_names or (), world.mesh.shape, strict=True))
    ep = 1 if world.experts is None else world.experts["ep"].size()
    cp, tp, pp = sizes["cp"], sizes["tp"], sizes["pp"]
    processes, shards = world.shards.size(), world.shards.shape[-1]

    def part(size: int) -> float:
        return (size - 1) / size

    casts, blocks = cast_by_fsdp(model, dtype, master_dtype), repeated_blocks(model)
    _, *embeddings = reversed(units_of(model, blocks)[len(blocks) :])
    twice = {id(each) for block in blocks for each in block.parameters()}
    twice |= {id(each) for unit in embeddings for each in unit.parameters() if each.requires_grad}
    reductions = micro_batches if world.reduce_every_micro_batch else 1
    sharding = replicas = 0.0
    whole = undivided(model, blocks, tp, world.loss_parallel).values()
    seen = set()
    for name, module in model.named_modules():
        shares = ep if ".experts" in f".{name}" and ep > 1 else 1
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            stored = as_dtype(dtype) if parameter in casts else stored_dtype(module, parameter, dtype, master_dtype)
            count = parameter.numel() / shares / (1 if module in whole else tp) / pp
            # Gathered in forward and again in backward; the root only once; once per step if it stays gathered.
            times = 1 if world.units_stay_gathered else micro_batches * (1 + (id(parameter) in twice))
            own = max(1, shards // shares)
            sharding += times * part(own) * count * stored.itemsize
            if parameter.requires_grad:
                sharding += reductions * part(own) * count * REDUCED
                replicas += reductions * 2 * part(processes // shares // own) * count / own * REDUCED
    beside = " x cp" if cp > 1 else ""
    found = {"dp_replicate" + (beside if world.zero_stage == 0 else ""): replicas, f"dp_shard{beside}": sharding}
    config: Any = getattr(model, "config", None)
    if (tp, cp, ep, pp) != (1, 1, 1, 1) and hasattr(config, "layers"):  # a Decoder; others only have `tp`, by a plan
        numbers = as_dtype(dtype).itemsize * tokens
        hidden, layers = config.hidden_size, config.layers
        # A block has two parts, each with a gather and a scatter in forward and in backward. Add the input of a stage's
        # blocks in backward and their output. If embedding and head are shared, their activations are summed.
        summed = sum(each not in whole for each in (model.embedding, model.head_module))
        found["tp"] = numbers / cp * hidden * part(tp) * (8 * len(layers) / pp + 2 + 2 * summed / pp)
        attentions = [layer.attention for layer in layers]
        keys_and_values = sum(  # elements per token
            2 * each.num_kv_heads * each.head_dim if hasattr(each, "num_kv_heads") else each.pair_width
            for each in attentions
        )
        found["cp"] = numbers * 2 * part(cp) * keys_and_values / tp / pp
        routers = [layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")]
        found["ep"] = numbers / cp * hidden * 4 * part(ep) * sum(router.chosen for router in routers) / pp
        hops = pp * world.pp_virtual - 1  # the first and last stages only send in one direction
        found["pp"] = numbers / cp * hidden * 2 * hops / pp
    return {axis: size for axis, size in found.items() if size}
