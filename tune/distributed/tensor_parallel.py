"""Tensor parallelism: the processes of the mesh's axis `tp` share the heads and the widths of each block.

Each process computes a partial output of a block's part (attention, feed-forward) from its share of the weights; the
partial outputs are summed. Backward sums the gradients of the inputs and of replicated weights in a block, such as
norms. Between parts, each process holds a part of the tokens (sequence parallelism): a part of a block gathers all
tokens and scatters the sum of its outputs. Embedding and head process all tokens.

Parameters are DTensors in their usual order, which FSDP shards further: checkpoints and exports see them whole. Inside
a forward they are plain tensors, the process's share, so layers, adapters and quantized weights need no changes.

A module declares in `columns` its layers or parameters with shared outputs. Each has the fields of the config that
count the heads, or the width, of its joined projections. `rows` names layers with shared inputs. For modules without
these attributes, see `tune.distributed.plans`.
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
from tune.parts import part_of


def share(
    model: Any,
    blocks: list[nn.Module],
    units: list[nn.Module],
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    experts: DeviceMesh | None = None,
    loss_parallel: bool = True,
) -> None:
    """Turn the parameters of `model` into DTensors on `mesh`, keeping their values, and have its forwards see shares.

    The parameters of each of the `units`, which include the `blocks`, become plain tensors during its forward.
    Parameters that processes of `ep` share are already DTensors; they move to the mesh of both axes, `experts`. Without
    `loss_parallel`, each process has the whole head.

    Raises:
        TuneError: neither the model nor `plan` says how a part of a block is shared, or heads or widths do not divide.
    """
    inside = {module for block in blocks for module in block.modules()}
    peers, planned = Peers.of(mesh), None
    if any(hasattr(module, "columns") for module in inside):
        if plan:
            raise TuneError(f"parallel.plan: {type(model).__name__} needs no plan for parallel.tp. Set it to null")
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
        # All processes need the same order: some shares are gathered.
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
    """Return the uses of embeddings and heads, whose rows processes share, and wrap their forwards to exchange data."""
    uses: Uses = {}
    inside = {module for block in blocks for module in block.modules()}
    # Models with a `head_module` use an embedding's weight nowhere else; for others this is unknown.
    is_known, head = hasattr(model, "head_module"), getattr(model, "head_module", None)
    own_to_each = undivided(model, blocks, mesh.size(), loss_parallel).values()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.Linear) or module._parameters.get("weight") is None:
            continue
        if module in inside or module in own_to_each or part_of(model, name) != "language":
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
    """Return `parameter` as a DTensor on `mesh`; a parameter of experts on the mesh `experts`."""
    placements: list[Placement] = [Replicate() if use.dim is None else Shard(use.dim)]
    if experts is not None and isinstance(parameter, DTensor):
        mesh, placements = experts, [*parameter.placements, *placements]
    whole = parameter.detach()
    if parameter.is_meta or isinstance(parameter, DTensor):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def undivided(model: nn.Module, blocks: list[nn.Module], size: int, loss_parallel: bool) -> dict[str, nn.Module]:
    """Return, by name, the embeddings and heads that each process has whole: `size` does not divide their rows, or it
    is the head (also a tied one) without `loss_parallel`."""
    inside = {module for block in blocks for module in block.modules()}
    head = None if loss_parallel else getattr(model, "head_module", None)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.Linear) and module not in inside
        if part_of(model, name) == "language"
        if module.weight is not None and (len(module.weight) % size or module is head)
    }


def _uses_of_parts(blocks: list[nn.Module], mesh: DeviceMesh, peers: Peers, shares_tokens: bool) -> Uses:
    """Return the uses of a model that declares them, and wrap the parts of its blocks to exchange hidden states."""
    parts = [part for block in blocks for part in block.children() if not isinstance(part, nn.RMSNorm | nn.LayerNorm)]
    parts = [part for part in parts if any(True for _ in part.parameters())]
    counts: dict[str, tuple[str, int]] = {}
    for part in parts:
        sharing: list[Any] = [module for module in part.modules() if hasattr(module, "columns")]
        if not sharing:
            raise TuneError(
                f"parallel.tp: {type(part).__name__} declares no shared layers (see `columns` in "
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
    """Return the uses of the parameters of the shared layers of `module`."""
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
    """Wrap the `forward` of a part of a block, which computes a partial output on each process, to sum the outputs."""

    def summing(hidden: Tensor, context: Any) -> Any:
        is_shared = shares_tokens and context.cache is None
        shape = context.positions.shape
        # No variable for the gathered tokens: it would keep them alive for longer.
        output = forward(peers.gathered_tokens(hidden, shape) if is_shared else peers.copied(hidden), context)
        output, *stats = output if isinstance(output, tuple) else (output,)
        output = peers.scattered(peers.padded(output))[None] if is_shared else peers.summed(output)
        if not stats:
            return output
        if stats[0] is not None:  # router statistics, equal on all processes: each adds a part of the gradient
            balance = stats[0].balance.detach()
            stats = [stats[0]._replace(balance=balance + (stats[0].balance - balance) / peers.size)]
        return output, *stats

    return summing


def _with_own_rows(peers: Peers, count: int, forward: Forward) -> Forward:
    """Wrap the `forward` of an embedding of which each process has `count` rows: it looks up its own rows and gets the
    others from other processes."""
    first = count * peers.rank

    def looking_up(tokens: Tensor) -> Tensor:
        places = tokens - first
        inside = (places >= 0) & (places < count)
        return peers.summed(forward(places.clamp(0, count - 1)) * inside[..., None])

    return looking_up


def _with_shares_of_head(model: Any, mesh: DeviceMesh, forward: Forward) -> Forward:
    """Wrap the `forward` of `model` to pass the head shares of the output weight's rows as a DTensor, if the head
    accepts them (`takes_shares`), else the whole weight. Without a head but with a cache (generation), the result is
    shares of the logits."""
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
    """Replace the `forward` of a norm over all heads by one that uses the mean square of all processes' heads."""

    def normalized(input: Tensor) -> Tensor:
        values = input.float()
        square = peers.summed(values.square().mean(dim=-1, keepdim=True) / peers.size)
        scale = torch.rsqrt(peers.copied(square) + cast(float, norm.eps))
        return (values * scale * norm.weight.float()).type_as(input)

    return normalized
