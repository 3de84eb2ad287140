"""Tensor parallelism: the processes of the mesh's axis `tp` share the heads and the widths of each block.

A part of a block (attention, feed-forward) computes on each process, from its share of the weights, a summand of the
output; these are summed. In backward the gradients of the input are summed, and those of the weights in a part that
every process has, such as norms of heads. All outside of parts is computed by each process alike.

Parameters are DTensors in their usual order, which FSDP shards further: checkpoints and exports see them whole. Inside
a forward they are plain tensors, the share of the process, so that layers, adapters and quantised weights know nothing
of it. A module says with `columns` which of its layers or parameters have outputs that are shared, each with the fields
of its config that count the heads, or the width, of the projections joined in it; with `rows`, which have such inputs.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tune.errors import TuneError

# Parameters of a layer that have a dimension of its outputs, and those that have one of its inputs: the last one.
OUTPUTS = {"weight", "codes", "scales", "ranges", "bias", "magnitude", "lora_b", "start_b"}
INPUTS = {"weight", "codes", "scales", "lora_a", "start_a"}
REPEATED = {"num_kv_heads", "num_key_heads"}  # several processes may have the same of these heads


class Use(NamedTuple):
    """What a forward sees of a parameter that is sharded over `dim` (None: every process has it): the process's own
    shard, or with `slices` these of the whole.

    In a `part` the gradient of what several processes have is summed; they add `1 / divisor` of it each.
    """

    dim: int | None = None
    slices: tuple[slice, ...] | None = None
    part: bool = False
    divisor: int = 1

    def of(self, parameter: DTensor) -> Tensor:
        is_own = self.dim is not None and self.slices is None
        if self.slices is not None:
            parameter = parameter.redistribute(placements=[Replicate()])
        local = parameter.to_local(grad_placements=[Partial()] if self.part and not is_own else None)
        if self.slices is not None and self.dim is not None:
            local = torch.cat([local[(slice(None),) * self.dim + (each,)] for each in self.slices], dim=self.dim)
        return local if self.divisor == 1 else local / self.divisor


Uses = dict[tuple[nn.Module, str], Use]  # by module and name of its parameter
WHOLE = (slice(None),)


def share(model: nn.Module, blocks: list[nn.Module], units: list[nn.Module], mesh: DeviceMesh) -> None:
    """Make the parameters of `model`, on the meta device, DTensors on `mesh`, and its forwards see their shares.

    The parameters of each of the `units`, among them the `blocks`, become plain when its forward begins.

    Raises:
        TuneError: a part of a block does not say how it is shared, or heads or widths cannot be.
    """
    parts = [part for block in blocks for part in block.children() if not isinstance(part, nn.RMSNorm | nn.LayerNorm)]
    parts = [part for part in parts if any(True for _ in part.parameters())]
    _require_shares(parts, mesh.size())
    uses: Uses = {}
    for part in parts:
        uses |= {(module, kind): Use(part=True) for module in part.modules() for kind in module._parameters}
        for module in part.modules():
            uses |= _uses(module, mesh)
        _sum_outputs(part, mesh)
    head = getattr(model, "head", None)
    for module in model.modules():
        weight = module._parameters.get("weight")
        is_vocabulary = isinstance(module, nn.Embedding | nn.Linear) and (module, "weight") not in uses
        if is_vocabulary and weight is not None and len(weight) % mesh.size() == 0:
            is_plain = type(module) in (nn.Embedding, nn.Linear)
            uses[module, "weight"] = Use(0, None if is_plain else WHOLE)
            if type(module) is nn.Embedding:
                _look_up_shares(module, mesh)
            if is_plain and (head is None or module is head):
                _share_head(model, mesh)
    shared: dict[Tensor, nn.Parameter] = {}
    taken: set[nn.Module] = set()
    for unit in units:
        mine: Uses = {}
        for module in (each for each in unit.modules() if each not in taken):  # in one order: some shares are gathered
            for kind, parameter in module._parameters.items():
                if parameter is not None:
                    use = mine[module, kind] = uses.get((module, kind), Use())
                    if parameter not in shared:
                        placement = Replicate() if use.dim is None else Shard(use.dim)
                        tensor = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
                        shared[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                    module._parameters[kind] = shared[parameter]
        taken |= set(unit.modules())
        see_shares(unit, mine)


def _require_shares(parts: list[nn.Module], size: int) -> None:
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
                for field in fields:
                    counts[f"{field}={getattr(module.config, field)}"] = field, getattr(module.config, field)

    def fits(size: int) -> dict[str, bool]:
        return {
            text: count % size == 0 or (field in REPEATED and size % count == 0)
            for text, (field, count) in counts.items()
        }

    if bad := [text for text, does in fits(size).items() if not does]:
        good = [
            str(each) for each in range(1, max(count for _, count in counts.values()) + 1) if all(fits(each).values())
        ]
        raise TuneError(
            f"parallel.tp: {size} processes cannot share {', '.join(bad)} of this model. Set it to {' or '.join(good)}"
        )


def _uses(module: Any, mesh: DeviceMesh) -> Uses:
    """How the parameters of the layers of `module` that are shared are used."""
    uses: Uses = {}
    columns = getattr(module, "columns", {})
    for name, fields in columns.items():
        if (layer := getattr(module, name, None)) is None:
            continue
        counts = [getattr(module.config, field) for field in fields]
        for owner, kind, parameter in (
            [(module, name, layer)] if isinstance(layer, nn.Parameter) else parameters_of(layer)
        ):
            if kind in OUTPUTS or parameter is layer:
                stack = hasattr(layer, "num_experts")
                dim = stack + (kind == "weight" and getattr(layer, "transposed", False))
                widths = module.widths if len(counts) == 3 else [parameter.shape[dim] // len(counts)] * len(counts)
                uses[owner, kind] = Use(dim, _slices(widths, counts, mesh), part=True)
        if type(layer) is nn.RMSNorm:
            _norm_over_processes(layer, mesh)
    for name in getattr(module, "rows", ()):
        layer = getattr(module, name)
        layer.first_input = mesh.get_local_rank() * layer.in_features // mesh.size()
        layer.input_group = mesh.get_group().group_name
        for owner, kind, parameter in parameters_of(layer):
            if layer.in_features % (getattr(owner, "block", 1) * mesh.size()):
                raise TuneError(
                    f"parallel.tp: {mesh.size()} processes cannot share {layer.in_features} inputs of a quantised "
                    f"{name} by blocks of {owner.block}. Lower it, or set quantization.weights=null"
                )
            if kind in INPUTS:
                transposed = kind == "weight" and getattr(layer, "transposed", False)
                uses[owner, kind] = Use(parameter.ndim - 1 - transposed, part=True)
            elif kind == "bias":
                uses[owner, kind] = Use(part=True, divisor=mesh.size())
    if hasattr(module, "widths"):
        counts = [getattr(module.config, field) for field in columns["query_key_value"]]
        module.widths = [width // min(count, mesh.size()) for width, count in zip(module.widths, counts, strict=True)]
    return uses


def _slices(widths: list[int], counts: list[int], mesh: DeviceMesh) -> tuple[slice, ...] | None:
    """This process's slices of outputs that join projections of such `widths`, each for so many heads; None if it is
    its shard."""
    if len(counts) == 1 and counts[0] % mesh.size() == 0:
        return None
    slices, start = [], 0
    for width, count in zip(widths, counts, strict=True):
        shares = min(count, mesh.size())
        first = start + mesh.get_local_rank() * shares // mesh.size() * (width // shares)
        slices.append(slice(first, first + width // shares))
        start += width
    return tuple(slices)


def parameters_of(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in layer.modules():
        yield from ((owner, kind, each) for kind, each in owner._parameters.items() if each is not None)


def see_shares(unit: nn.Module, uses: Uses) -> None:
    """Replace, while `unit` runs, its parameters by what it sees of them."""
    forward = unit.forward

    def seeing(*args: Any, **kwargs: Any) -> Any:
        whole: dict[tuple[nn.Module, str], Any] = {key: key[0]._parameters[key[1]] for key in uses}
        seen = {key: use.of(whole[key]) for key, use in uses.items()}
        try:
            for (module, kind), tensor in seen.items():
                module._parameters[kind] = tensor  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            for (module, kind), parameter in whole.items():
                module._parameters[kind] = parameter

    unit.forward = seeing


def _sum_outputs(part: nn.Module, mesh: DeviceMesh) -> None:
    forward, group = part.forward, mesh.get_group().group_name

    def with_sum(hidden: Tensor, context: Any) -> Any:
        output = forward(_Copied.apply(hidden, group), context)
        if not isinstance(output, tuple):
            return SummedOver.apply(output, group)
        output, stats = output
        if stats is not None:  # of routers, the same on each process: each adds a part of the gradient
            balance = stats.balance.detach()
            stats = stats._replace(balance=balance + (stats.balance - balance) / mesh.size())
        return SummedOver.apply(output, group), stats

    part.forward = with_sum


def _look_up_shares(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Have an embedding look up the tokens whose rows it has, and take the others from other processes."""
    forward, group = embedding.forward, mesh.get_group().group_name
    rows = embedding.num_embeddings // mesh.size()
    first = rows * mesh.get_local_rank()

    def looked_up(input: Tensor) -> Tensor:
        places = input - first
        inside = (places >= 0) & (places < rows)
        return SummedOver.apply(forward(places.clamp(0, rows - 1)) * inside[..., None], group)

    embedding.forward = looked_up  # type: ignore[method-assign]


def _share_head(model: Any, mesh: DeviceMesh) -> None:
    """Give heads that take them (`takes_shares`) shares of the output weight's rows, as a DTensor; others the whole."""
    forward, group = model.forward, mesh.get_group().group_name

    def sharing(batch: Any, head: Any = None, **others: Any) -> Any:
        def on_shares(hidden: Tensor, weight: Tensor, batch: Any, **options: Any) -> Any:
            shares = DTensor.from_local(weight, mesh, [Shard(0)])
            if head is None:
                logits = model.logits(_Copied.apply(hidden, group), weight, batch, **options)
                return DTensor.from_local(logits, mesh, [Shard(logits.ndim - 1)]).full_tensor()
            if getattr(head, "takes_shares", False):
                return head(_Copied.apply(hidden, group), shares, batch, **options)
            return head(hidden, shares.full_tensor(), batch, **options)

        return forward(batch, on_shares, **others)

    model.forward = sharing


def _norm_over_processes(norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
    """Have a norm of all heads together use the mean square of those of all processes."""
    group = mesh.get_group().group_name

    def normalized(input: Tensor) -> Tensor:
        values = input.float()
        square = SummedOver.apply(values.square().mean(dim=-1, keepdim=True) / mesh.size(), group)
        scale = torch.rsqrt(_Copied.apply(square, group) + norm.eps)
        return (values * scale * norm.weight.float()).type_as(input)

    norm.forward = normalized  # type: ignore[assignment, method-assign]


class _Copied(torch.autograd.Function):
    """The same on each process; in backward the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: str) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class SummedOver(torch.autograd.Function):
    """The sum over processes, each of which has the gradient."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: str) -> Tensor:
        return summed(summand, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def summed(tensor: Tensor, group: str) -> Tensor:
    """The sum over the processes of `group`, by its name."""
    total = collectives.all_reduce(tensor.contiguous(), "sum", group)  # type: ignore[arg-type]  # it takes names too
    return collectives.wait_tensor(total)
