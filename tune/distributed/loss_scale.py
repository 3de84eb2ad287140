"""Loss scaling for fp16, whose range is 6e-8 to 65,504."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only


class LossScale:
    """Multiply gradients by `value` inside the model, between its output and its parameters. The parameters' `grad` is
    unscaled and in fp32, so the loop needs no changes: neither its loss nor its gradients are scaled.

    Adapts like `torch.amp.GradScaler`: a step with gradients that are not finite halves the value and must be skipped;
    `GROWS_AFTER` finite steps in a row double it. `skipped` counts the skipped steps.
    """

    INITIAL, GROWS_AFTER = 2.0**16, 2000

    def __init__(self, model: nn.Module):
        """Scale the gradients of `model`, which `parallelize` has sharded or which is on one device."""
        self.value, self.steps, self.skipped = self.INITIAL, 0, 0
        self.sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for parameter in model.parameters():
            if parameter.requires_grad and not self.sharded:
                parameter.register_hook(lambda grad: grad / self.value)
        model.register_forward_hook(lambda module, inputs, output: tree_map_only(Tensor, self, output))
        if (routing := getattr(model, "routing", None)) is not None:  # the router loss begins inside the model
            routing.loss_scale = self
        self._tell_fsdp()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return `tensor` unchanged; its gradient is scaled in backward."""
        return _Scaled.apply(tensor, self.value) if tensor.requires_grad else tensor

    def update(self, is_finite: bool) -> None:
        """Adapt the value after a step; `is_finite`: the gradients are finite on all processes."""
        self.steps = self.steps + 1 if is_finite else 0
        self.skipped += not is_finite
        if not is_finite:
            self.value /= 2
        elif self.steps == self.GROWS_AFTER:
            self.value, self.steps = self.value * 2, 0
        self._tell_fsdp()

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "steps": self.steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.steps, self.skipped = state["value"], state["steps"], state["skipped"]
        self._tell_fsdp()

    def _tell_fsdp(self) -> None:
        """Have FSDP divide gradients by the value, in fp32, after it reduces them."""
        for module in self.sharded:
            module.set_gradient_divide_factor(self.value)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None
