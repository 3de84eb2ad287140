"""Views of the parameters that the processes of `tp` share, as a forward sees them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from tune.distributed.pace import waiting
from tune.distributed.wrapping import Forward, Wrap, wrap
from tune.errors import TuneError

# Parameters of a layer with a dimension for its outputs, and those whose last dimension is for its inputs.
OUTPUTS = {"weight", "codes", "scales", "ranges", "bias", "magnitude", "lora_b", "start_b"}
INPUTS = {"weight", "codes", "scales", "lora_a", "start_a"}
REPEATED = {"num_kv_heads", "num_key_heads"}  # several processes may have the same heads of these kinds


class Use(NamedTuple):
    """How a forward sees a parameter that is sharded over `dim` (None: every process has it): as the process's own
    shard, or as `slices` of the whole.

    `part`: each process computes a part of the result, so gradients of replicated parameters are summed. Each process
    contributes `1 / divisor` of the parameter.
    """

    dim: int | None = None
    slices: tuple[slice, ...] | None = None
    part: bool = False
    divisor: int = 1

    def of(self, parameter: DTensor) -> Tensor:
        is_own = self.dim is not None and self.slices is None
        others = parameter.placements[:-1]  # before `tp`: experts may be shared among the processes of `ep`, too
        if self.slices is not None:
            with waiting():
                parameter = parameter.redistribute(placements=[*others, Replicate()])
        local = parameter.to_local(grad_placements=[*others, Partial()] if self.part and not is_own else None)
        if self.slices is not None and self.dim is not None:
            before = (slice(None),) * self.dim
            local = torch.cat([local[(*before, part)] for part in self.slices], dim=self.dim)
        return local if self.divisor == 1 else local / self.divisor


Uses = dict[tuple[nn.Module, str], Use]  # by module and name of its parameter
WHOLE = (slice(None),)


def require_even(counts: Mapping[str, tuple[str, int]], size: int) -> None:
    """Raise TuneError if `size` processes cannot share the `counts` (description -> (field, count))."""

    def bad(size: int) -> list[str]:
        return [text for text, (field, n) in counts.items() if n % size and (field not in REPEATED or size % n)]

    if bad(size):
        most = max(count for _, count in counts.values())
        good = [str(fewer) for fewer in range(1, most + 1) if not bad(fewer)]
        raise TuneError(
            f"parallel.tp: {size} does not divide {', '.join(bad(size))} of this model. Set it to {' or '.join(good)}"
        )


def column(parameter: Tensor, dim: int, counts: list[int], mesh: DeviceMesh, widths: list[int] | None = None) -> Use:
    """Return the use of a parameter whose dimension `dim` joins projections with these `counts` of heads and these
    `widths` (default: equal)."""
    widths = widths or [parameter.shape[dim] // len(counts)] * len(counts)
    return Use(dim, _slices(widths, counts, mesh), part=True)


def columns_of(layer: nn.Module, counts: list[int], mesh: DeviceMesh, widths: list[int] | None = None) -> Uses:
    """Return the uses of the parameters of a layer whose outputs are shared."""
    stack, transposed = hasattr(layer, "num_experts"), getattr(layer, "transposed", False)
    return {
        (owner, kind): column(parameter, stack + (kind == "weight" and transposed), counts, mesh, widths)
        for owner, kind, parameter in parameters_of(layer)
        if kind in OUTPUTS
    }


def rows_of(layer: Any, name: str, mesh: DeviceMesh) -> Uses:
    """Return the uses of the parameters of a layer whose inputs are shared."""
    uses: Uses = {}
    if hasattr(layer, "input_group"):  # an adapter
        layer.first_input = mesh.get_local_rank() * layer.in_features // mesh.size()
        layer.input_group = mesh.get_group().group_name
    for owner, kind, parameter in parameters_of(layer):
        if layer.in_features % (getattr(owner, "block", 1) * mesh.size()):
            raise TuneError(
                f"parallel.tp: {mesh.size()} does not divide the {layer.in_features} inputs of the quantized {name} "
                f"into whole blocks of {owner.block}. Lower it, or set model.quantization=null"
            )
        if kind in INPUTS:
            transposed = kind == "weight" and getattr(layer, "transposed", False)
            uses[owner, kind] = Use(parameter.ndim - 1 - transposed, part=True)
        elif kind == "bias":
            uses[owner, kind] = Use(part=True, divisor=mesh.size())
    return uses


def _slices(widths: list[int], counts: list[int], mesh: DeviceMesh) -> tuple[slice, ...] | None:
    """Return this process's slices of outputs that join projections of these `widths` and head `counts`; None if the
    process's shard is the slice."""
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
        for kind, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, kind, parameter


@dataclass(eq=False)
class Shares:
    """Replace parameters by their `uses` while a forward runs. Others may change `uses`."""

    uses: Uses

    def __call__(self, forward: Forward) -> Forward:
        def seeing(*args: Any, **kwargs: Any) -> Any:
            whole: dict[tuple[nn.Module, str], Any] = {key: key[0]._parameters[key[1]] for key in self.uses}
            seen = {key: use.of(whole[key]) for key, use in self.uses.items()}
            try:
                for (module, kind), tensor in seen.items():
                    module._parameters[kind] = tensor  # type: ignore[assignment]
                return forward(*args, **kwargs)
            finally:
                for (module, kind), parameter in whole.items():
                    module._parameters[kind] = parameter

        return seeing


def see_shares(unit: nn.Module, uses: Uses) -> None:
    """Have the forward of `unit` see its parameters through `uses`."""
    wrap(unit, Wrap.SHARES, Shares(uses))
