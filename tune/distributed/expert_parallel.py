"""Expert parallelism: each process of the axis `ep` holds some of the experts and reads its own rows of data.

A module that supports this has `expert_mesh`, the processes that share its experts, and a child `experts` whose
parameters all have the experts as first dimension. It sends tokens to the processes that hold their experts. FSDP
shards experts over the processes with the same experts, and all other parameters over all of `dp_shard`. With `tp`, a
process holds a part of the width of its experts; the partial outputs for a token are sent to the same process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tune.distributed.uses import Use, parameters_of, see_shares
from tune.distributed.wrapping import Wrap, wrapper_of
from tune.errors import TuneError


class Whole(NamedTuple):
    """A parameter that is already gathered, as a forward sees it."""

    tensor: Tensor

    def of(self, parameter: DTensor) -> Tensor:
        return self.tensor


def share_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share the experts of `model`, on the meta device, among the processes of `mesh`.

    Raises:
        TuneError: the model is trained but has no experts, or their number is not divisible.
    """
    mixtures = _mixtures(model)
    if not mixtures and any(parameter.requires_grad for parameter in model.parameters()):
        raise TuneError(
            f"parallel.ep: {type(model).__name__} has no experts that processes can share; only mixture-of-experts "
            "models of tune.models.build do. Set parallel.ep=1"
        )
    for mixture in mixtures:
        parameters = list(parameters_of(mixture.experts))
        for _, _, parameter in parameters:
            if (count := len(parameter)) % mesh.size():
                good = " or ".join(str(fewer) for fewer in range(1, count + 1) if count % fewer == 0)
                raise TuneError(f"parallel.ep: {mesh.size()} does not divide {count} experts. Set it to {good}")
        for owner, kind, parameter in parameters:
            share = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            owner._parameters[kind] = nn.Parameter(share, requires_grad=parameter.requires_grad)
        mixture.expert_mesh = mesh
        see_shares(mixture.experts, {(owner, kind): Use(0) for owner, kind, _ in parameters})


def shared_experts(model: nn.Module) -> list[nn.Module]:
    """Return the `experts` modules of a model that several processes share."""
    return [mixture.experts for mixture in _mixtures(model) if mixture.expert_mesh is not None]


@contextmanager
def whole_experts(model: nn.Module) -> Iterator[None]:
    """A context in which each process has all experts; FSDP must have gathered the process's own."""
    sharing = [(mixture, mixture.expert_mesh) for mixture in _mixtures(model) if mixture.expert_mesh is not None]
    before: list[dict[Any, Any]] = []
    for mixture, _ in sharing:
        uses = wrapper_of(mixture.experts, Wrap.SHARES).uses
        before.append({**uses})
        for (owner, kind), use in before[-1].items():
            parameter: Any = owner._parameters[kind].detach()
            everywhere = [Replicate(), *parameter.placements[1:]]
            uses[owner, kind] = Whole(use.of(parameter.redistribute(placements=everywhere)))
        mixture.expert_mesh = None
    try:
        yield
    finally:
        for (mixture, mesh), uses in zip(sharing, before, strict=True):
            wrapper_of(mixture.experts, Wrap.SHARES).uses |= uses
            mixture.expert_mesh = mesh


def _mixtures(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "expert_mesh")]
