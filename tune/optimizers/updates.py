"""Updates beyond torch's optimizers: Muon and Adafactor for sharded parameters, and optimizer steps inside backward, so
that gradients take little memory."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tune.distributed import full_tensor, layout_of, local_shard, norm_of_squares, sum_of_squares
from tune.errors import TuneError
from tune.types import PositiveInt


class Muon(Optimizer):
    """torch's Muon (Jordan et al., 2024) for the matrices of blocks, torch's AdamW for vectors, embeddings and output
    head. Muon updates each matrix of a stack, such as the weights of experts, separately.

    `params` are the groups of `parameter_groups`. Your own groups with matrices must name the optimizer:
    {"params": [...], "in_blocks": True} is for Muon. Shapes cannot decide, since embedding and head are matrices too.
    Muon's updates are scaled to the size of AdamW's (Liu et al., 2025), so one `lr` and `weight_decay` suit both.
    `betas` and `eps` are for AdamW.

    Raises:
        TuneError: a group with a matrix has no `in_blocks`; a parameter for Muon is neither a matrix nor a stack of
            matrices, or is split within a matrix.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: PositiveInt = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        self.settings = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}, {"betas": betas, "eps": eps}
        self.parts: dict[bool, Optimizer] = {}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "in_blocks": None})
        self._make_parts()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        number, group = len(self.param_groups) - 1, self.param_groups[-1]
        shapes = [list(each.shape) for each in group["params"]]
        if group["in_blocks"] is None:
            if matrices := [shape for shape in shapes if len(shape) > 1]:
                raise TuneError(
                    f"Muon: group {number} has {len(matrices)} matrices, the first of shape {matrices[0]}, but no "
                    "in_blocks. Set in_blocks=True (blocks: Muon) or False (embedding or head: AdamW), or use "
                    "tune.optimizers.parameter_groups(model, lr)"
                )
            group["in_blocks"] = False
        if group["in_blocks"] and (others := [shape for shape in shapes if len(shape) not in (2, 3)]):
            raise TuneError(
                f"Muon: group {number} has in_blocks=True but a parameter of shape {others[0]}, which is neither a "
                "matrix nor a stack of matrices. Move it to a group with in_blocks=False"
            )
        if self.parts:
            self._make_parts()

    def _make_parts(self) -> None:
        in_blocks = [parameter for group in self._groups(in_blocks=True) for parameter in group["params"]]
        if any(isinstance(each, DTensor) and "tp" in (each.device_mesh.mesh_dim_names or ()) for each in in_blocks):
            raise TuneError("optimizer._component_: Muon needs whole matrices: set parallel.tp=1")
        stacks = [each for each in in_blocks if isinstance(each, DTensor) and each.ndim == 3]
        if any(place.is_shard(1) or place.is_shard(2) for each in stacks for place in each.placements):
            raise TuneError(
                "optimizer._component_: Muon needs whole matrices of experts: with parallel.ep the number of experts "
                "must be a multiple of dp_shard x cp. Raise parallel.dp_replicate"
            )
        of_muon, of_adamw = self.settings
        if self._groups(in_blocks=True):
            a_matrix = nn.Parameter(torch.empty(1, 1))  # a placeholder: `step` gives it the matrices
            self.parts[True] = torch.optim.Muon([a_matrix], adjust_lr_fn="match_rms_adamw", **of_muon)  # type: ignore[arg-type]
        if groups := self._groups(in_blocks=False):
            self.parts[False] = torch.optim.AdamW(groups, **of_adamw)  # type: ignore[arg-type]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for in_blocks, part in self.parts.items():
            # Groups and state belong to this optimizer, which is saved and restored; the parts borrow them.
            part.param_groups, part.state = self._groups(in_blocks), self.state
            if in_blocks:
                part.state = defaultdict(dict)
                part.param_groups = [
                    part.defaults | group | {"params": [matrix for p in group["params"] for matrix in self._split(p)]}
                    for group in part.param_groups
                ]
            part.step()

    def _groups(self, in_blocks: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["in_blocks"] == in_blocks]

    def _split(self, parameter: Tensor) -> Iterator[Tensor]:
        """Yield the local matrices of a parameter, with their gradients and momenta."""
        if parameter.grad is None:
            return
        state, matrices = self.state[parameter], self.parts[True].state
        if parameter.ndim == 2:
            matrices[parameter] = state
            yield parameter
            return
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        stacks = (parameter.detach(), parameter.grad, state["momentum_buffer"])
        for weight, gradient, momentum in zip(*(local_shard(stack)[0] for stack in stacks), strict=True):
            matrix = nn.Parameter(weight)
            matrix.grad = gradient
            matrices[matrix] = {"momentum_buffer": momentum}
            yield matrix


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor (Shazeer and Stern, 2018) with support for DTensors: each parameter in turn is gathered and
    updated on all processes."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    whole = nn.Parameter(full_tensor(parameter.detach()))
                    whole.grad = full_tensor(parameter.grad)
                    self.state[whole] = self.state.pop(parameter, {})
                    self.param_groups = [group | {"params": [whole]}]
                    super().step()
                    self.state[parameter] = self.state.pop(whole)
                    shard, where = local_shard(parameter)
                    shard.copy_(whole[where])
        self.param_groups = groups


class InBackward:
    """Register hooks so that `optimizer` updates each parameter as soon as its gradient is complete, then frees the
    gradient. `optimizer.step()` then has nothing to do; learning rates and state stay in the optimizer.

    A second backward between two calls of `norm` raises TuneError. Gradients cannot be clipped: the norm is only known
    after the updates.

    Raises:
        TuneError: FSDP offloads parameters to host memory, where gradients arrive after the hooks.
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self.squares: dict[object, Tensor] = {}  # sums of squared gradients by layout
        self.updated: set[int] = set()  # ids of parameters updated since the last call of norm
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and _is_offloaded(parameter):
                    raise TuneError(
                        "compute.cpu_offload: must be false with InBackward, which would read gradients before they "
                        "reach the host. Set it to false, or update in optimizer.step()"
                    )
                parameter.register_post_accumulate_grad_hook(functools.partial(self._update, index))

    def norm(self) -> Tensor:
        """Return the norm of all gradients since the last call. A collective: all processes must call it."""
        squares = list(self.squares.values())
        self.squares.clear()
        self.updated.clear()
        return norm_of_squares(squares)

    def _update(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if id(parameter) in self.updated:
            raise TuneError(
                "global_batch_size: a parameter has a second gradient in one step, but InBackward already applied the "
                "first. A step must have one micro-batch: set micro_batch_size to global_batch_size divided by the "
                "number of data-parallel processes. In your own loop, call norm() once per step"
            )
        self.updated.add(id(parameter))
        layout = layout_of(parameter.grad)
        square = sum_of_squares([parameter.grad])
        self.squares[layout] = self.squares[layout] + square if layout in self.squares else square
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [groups[index] | {"params": [parameter]}]
        self.optimizer.step()
        self.optimizer.param_groups = groups
        parameter.grad = None


def _is_offloaded(parameter: DTensor) -> bool:
    return parameter.to_local().device.type == "cpu" != parameter.device_mesh.device_type
