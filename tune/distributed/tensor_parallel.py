"""Tensor parallelism: the processes of the mesh's axis `tp` share the heads and the widths of each block.

A part of a block (attention, feed-forward) computes on each process, from its share of the weights, a summand of the
output; these are summed. In backward the gradients of the input are summed, and those of the weights in a block that
every process has, such as norms. Between parts a process has a part of the tokens (sequence parallelism): a part of a
block gathers them all, and the sum of its outputs is scattered. Embedding and head are of all tokens.

Parameters are DTensors in their usual order, which FSDP shards further: checkpoints and exports see them whole. Inside
a forward they are plain tensors, the share of the process, so that layers, adapters and quantised weights know nothing
of it. A module says with `columns` which of its layers or parameters have outputs that are shared, each with the fields
of its config that count the heads, or the width, of the projections joined in it; with `rows`, which have such inputs.
For modules that do not, `tune.distributed.plans` says it.
"""

import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tune.distributed.exchanges import Peers
from tune.distributed.expert_parallel import shared_experts
from tune.distributed.plans import SharingPlan
from tune.distributed.uses import WHOLE, Use, Uses, column, columns_of, require_even, rows_of, see_shares
from tune.distributed.wrapping import Forward, Wrap, wrap, wrapper_of
from tune.errors import TuneError


def share(
    model: Any,
    blocks: list[nn.Module],
    units: list[nn.Module],
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    experts: DeviceMesh | None = None,
    loss_parallel: bool = True,
) -> None:
    """Make the parameters of `model` DTensors on `mesh`, with their values if they have some, and its forwards see
    their shares.

    The parameters of each of the `units`, among them the `blocks`, become plain when its forward begins. Those that
    processes of `ep` share are DTensors already, and become ones on the mesh of both, `experts`. Without
    `loss_parallel` each process has the whole head.

    Raises:
        TuneError: a part of a block does not say how it is shared, and no `plan` does, or heads or widths cannot be.
    """
    inside = {module for block in blocks for module in block.modules()}
    peers, planned = Peers.of(mesh), None
    if any(hasattr(module, "columns") for module in inside):
        if plan:
            raise TuneError(f"parallel.plan: {type(model).__name__} says itself how it is shared. Set it to null")
        shares_tokens = hasattr(model, "token_peers")
        uses = _uses_of_parts(blocks, mesh, peers, shares_tokens)
        if shares_tokens:
            model.token_peers = peers
    else:
        planned = SharingPlan(model, blocks, mesh, plan)
        uses = planned.uses
    uses |= _uses_outside_blocks(model, blocks, mesh, loss_parallel)
    shared: dict[Tensor, nn.Parameter] = {}
    taken: set[nn.Module] = set()
    shared_among_more = shared_experts(model)
    for unit in [*shared_among_more, *units]:
        mine: Uses = {}
        # In one order: some shares are gathered.
        for module in (module for module in unit.modules() if module not in taken):
            for kind, parameter in module._parameters.items():
                if parameter is not None:
                    use = mine[module, kind] = uses.get((module, kind), Use())
                    if parameter not in shared:
                        shared[parameter] = _shared(parameter, use, mesh, experts)
                    module._parameters[kind] = shared[parameter]
        taken |= set(unit.modules())
        if unit in shared_among_more:
            wrapper_of(unit, Wrap.SHARES).uses |= mine
        else:
            see_shares(unit, mine)
        if unit in inside and planned is not None:
            planned.seen.append(mine)


def _uses_outside_blocks(model: Any, blocks: list[nn.Module], mesh: DeviceMesh, loss_parallel: bool) -> Uses:
    """Of embeddings and heads, whose rows processes share; their forwards exchange what they must."""
    uses: Uses = {}
    inside = {module for block in blocks for module in block.modules()}
    # What else reads the weight of an embedding, or of a linear layer, is known of models with a `head_module`.
    is_known, head = hasattr(model, "head_module"), getattr(model, "head_module", None)
    own_to_each = undivided(model, blocks, mesh.size(), loss_parallel).values()
    for module in model.modules():
        if not isinstance(module, nn.Embedding | nn.Linear) or module._parameters.get("weight") is None:
            continue
        if module in inside or module in own_to_each:
            continue
        is_plain_head = type(module) is nn.Linear and module is head
        sees_shares = is_plain_head or (type(module) is nn.Embedding and is_known)
        uses |= {(module, kind): Use(0, None if sees_shares else WHOLE) for kind in ("weight", "bias")}
        if sees_shares and isinstance(module, nn.Embedding):
            count = module.num_embeddings // mesh.size()
            wrap(module, Wrap.EXCHANGE, functools.partial(_with_own_rows, Peers.of(mesh), count))
        if sees_shares and module is head:
            wrap(model, Wrap.HEAD, functools.partial(_with_shares_of_head, model, mesh))
    return uses


def _shared(parameter: nn.Parameter, use: Use, mesh: DeviceMesh, experts: DeviceMesh | None) -> nn.Parameter:
    """`parameter` as a DTensor on `mesh`, or one of `experts` on theirs."""
    placements: list[Placement] = [Replicate() if use.dim is None else Shard(use.dim)]
    if experts is not None and isinstance(parameter, DTensor):
        mesh, placements = experts, [*parameter.placements, *placements]
    whole = parameter.detach()
    if parameter.is_meta or isinstance(parameter, DTensor):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def undivided(model: nn.Module, blocks: list[nn.Module], size: int, loss_parallel: bool) -> dict[str, nn.Module]:
    """The embeddings and heads, by name, that `size` processes have whole: their rows do not divide, or without
    `loss_parallel` the head, which may be an embedding too."""
    inside = {module for block in blocks for module in block.modules()}
    head = None if loss_parallel else getattr(model, "head_module", None)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.Linear) and module not in inside
        if module.weight is not None and (len(module.weight) % size or module is head)
    }


def _uses_of_parts(blocks: list[nn.Module], mesh: DeviceMesh, peers: Peers, shares_tokens: bool) -> Uses:
    """Of models that say how they are shared; their parts exchange what is to be."""
    parts = [part for block in blocks for part in block.children() if not isinstance(part, nn.RMSNorm | nn.LayerNorm)]
    parts = [part for part in parts if any(True for _ in part.parameters())]
    counts: dict[str, tuple[str, int]] = {}
    for part in parts:
        sharing: list[Any] = [module for module in part.modules() if hasattr(module, "columns")]
        if not sharing:
            raise TuneError(
                f"parallel.tp: {type(part).__name__} does not say how processes share it (see `columns` in "
                "tune.distributed.tensor_parallel); models of tune.models.build do. Set parallel.tp=1"
            )
        for module in sharing:
            for fields in module.columns.values():
                sizes = {field: getattr(module.config, field) for field in fields}
                counts |= {f"{field}={count}": (field, count) for field, count in sizes.items()}
    require_even(counts, mesh.size())
    uses: Uses = {}
    for part in blocks if shares_tokens else parts:
        uses |= {(module, kind): Use(part=True) for module in part.modules() for kind in module._parameters}
    for part in parts:
        for module in part.modules():
            uses |= _uses(module, mesh)
        wrap(part, Wrap.EXCHANGE, functools.partial(_with_sum, peers, shares_tokens))
    return uses


def _uses(module: Any, mesh: DeviceMesh) -> Uses:
    """How the parameters of the layers of `module` that are shared are used."""
    uses: Uses = {}
    columns = getattr(module, "columns", {})
    for name, fields in columns.items():
        if (layer := getattr(module, name, None)) is None:
            continue
        counts = [getattr(module.config, field) for field in fields]
        widths = module.widths if len(counts) == 3 else None
        if isinstance(layer, nn.Parameter):
            uses[module, name] = column(layer, 0, counts, mesh, widths)
        else:
            uses |= columns_of(layer, counts, mesh, widths)
        if type(layer) is nn.RMSNorm:
            wrap(layer, Wrap.EXCHANGE, functools.partial(_over_processes, layer, Peers.of(mesh)))
    for name in getattr(module, "rows", ()):
        uses |= rows_of(getattr(module, name), name, mesh)
    if hasattr(module, "widths"):
        counts = [getattr(module.config, field) for field in columns["query_key_value"]]
        module.widths = [width // min(count, mesh.size()) for width, count in zip(module.widths, counts, strict=True)]
    return uses


def _with_sum(peers: Peers, shares_tokens: bool, forward: Forward) -> Forward:
    """A `forward` of a part of a block that computes a summand of the output on each process."""

    def summing(hidden: Tensor, context: Any) -> Any:
        is_shared = shares_tokens and context.cache is None
        shape = context.positions.shape
        # Not in a variable, which would keep it for longer.
        output = forward(peers.gathered_tokens(hidden, shape) if is_shared else peers.copied(hidden), context)
        output, *stats = output if isinstance(output, tuple) else (output,)
        output = peers.scattered(peers.padded(output))[None] if is_shared else peers.summed(output)
        if not stats:
            return output
        if stats[0] is not None:  # of routers, the same on each process: each adds a part of the gradient
            balance = stats[0].balance.detach()
            stats = [stats[0]._replace(balance=balance + (stats[0].balance - balance) / peers.size)]
        return output, *stats

    return summing


def _with_own_rows(peers: Peers, count: int, forward: Forward) -> Forward:
    """A `forward` of an embedding of which each process has `count` rows: it looks up the tokens of these, and takes
    the others from other processes."""
    first = count * peers.rank

    def looking_up(tokens: Tensor) -> Tensor:
        places = tokens - first
        inside = (places >= 0) & (places < count)
        return peers.summed(forward(places.clamp(0, count - 1)) * inside[..., None])

    return looking_up


def _with_shares_of_head(model: Any, mesh: DeviceMesh, forward: Forward) -> Forward:
    """A `forward` of `model` that gives heads which take them (`takes_shares`) shares of the output weight's rows, as a
    DTensor; others the whole. Without a head and with a cache, for generation, it gives shares of the logits."""
    peers = Peers.of(mesh)

    def sharing(batch: Any, head: Any = None, **others: Any) -> Any:
        def on_shares(hidden: Tensor, weight: Tensor, batch: Any, **options: Any) -> Any:
            shares = DTensor.from_local(weight, mesh, [Shard(0)])
            if head is None:
                logits = model.logits(peers.copied(hidden), weight, batch, **options)
                shares = DTensor.from_local(logits, mesh, [Shard(logits.ndim - 1)])
                return shares if "cache" in others else shares.full_tensor()
            if getattr(head, "takes_shares", False):
                return head(peers.copied(hidden), shares, batch, **options)
            return head(hidden, shares.full_tensor(), batch, **options)

        return forward(batch, on_shares, **others)

    return sharing


def _over_processes(norm: nn.RMSNorm, peers: Peers, forward: Forward) -> Forward:
    """In place of the `forward` of a norm of all heads together: with the mean square of the heads of all processes."""

    def normalized(input: Tensor) -> Tensor:
        values = input.float()
        square = peers.summed(values.square().mean(dim=-1, keepdim=True) / peers.size)
        scale = torch.rsqrt(peers.copied(square) + cast(float, norm.eps))
        return (values * scale * norm.weight.float()).type_as(input)

    return normalized
