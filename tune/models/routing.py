"""Expert routers, their statistics, and the load-balancing loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.collators import Documents


@dataclass(frozen=True)
class RouterConfig:
    """A router that selects `chosen` of `num_experts` for a token, with weights.

    `scores` are the softmax or the sigmoid of the logits, or the softmax over the `chosen` experts alone. `normalized`
    weights sum to one before they are multiplied by `scale`. As in DeepSeek-V3, the buffer `correction` is added to the
    scores for the choice only. Experts are chosen from `kept_groups` of `num_groups` groups, those with the largest
    sums of their two best scores.
    """

    num_experts: int
    chosen: int
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalized: bool = True
    bias: bool = False
    correction: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0


class Routing(NamedTuple):
    """`weights` (fp32) and `experts` `[tokens, chosen]`; `probabilities` (fp32) `[tokens, num_experts]`, which sum to
    one."""

    weights: Tensor
    experts: Tensor
    probabilities: Tensor


class Router(nn.Module):
    correction: Tensor | None

    def __init__(self, config: RouterConfig, hidden_size: int):
        super().__init__()
        self.config, self.in_features, self.out_features = config, hidden_size, config.num_experts
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.bias else None
        self.register_buffer("correction", torch.empty(config.num_experts) if config.correction else None)

    def forward(self, tokens: Tensor) -> Routing:
        """The routing of `tokens` `[tokens, dim]`."""
        return self.routing(tokens, self.weight)

    def routing(self, tokens: Tensor, weight: Tensor) -> Routing:
        """The routing of `tokens` by `weight` `[num_experts, dim]`."""
        config = self.config
        if config.scores == "sigmoid":
            scores = F.linear(tokens.float(), weight.float()).sigmoid()
            experts = self._choose(scores)
            weights, probabilities = scores.gather(1, experts), scores / (scores.sum(dim=1, keepdim=True) + 1e-20)
        else:
            logits = F.linear(tokens, weight, self.bias).float()
            probabilities = logits.softmax(dim=1)
            if config.scores == "softmax":
                weights, experts = probabilities.topk(config.chosen)
            else:
                best, experts = logits.topk(config.chosen)
                weights = best.softmax(dim=1)
        if config.normalized:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return Routing(weights * config.scale if config.scale != 1 else weights, experts, probabilities)

    def _choose(self, scores: Tensor) -> Tensor:
        config = self.config
        if self.correction is not None:
            scores = scores.detach() + self.correction
        if config.num_groups > 1:
            groups = scores.unflatten(1, (config.num_groups, -1))
            kept = groups.topk(2).values.sum(dim=2).topk(config.kept_groups).indices
            dropped = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, kept, False)
            scores = groups.masked_fill(dropped[..., None], float("-inf")).flatten(1)
        return scores.topk(config.chosen).indices

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """Called by `to` and `to_empty`. Keeps the correction in fp32, since rounding would change the choices."""
        correction = self.correction
        super()._apply(fn, recurse)
        if correction is not None and self.correction is not None:
            self.correction = torch.empty_like(self.correction, dtype=torch.float32)
            if not correction.is_meta:
                self.correction.copy_(correction)
        return self


class RoutingStats(NamedTuple):
    """Sums over documents with supervised tokens: tokens per expert `[num_experts]`, entropy of the tokens'
    probabilities, and each document's load-balancing loss times its supervised tokens."""

    load: Tensor
    entropy: Tensor
    balance: Tensor

    @classmethod
    def of(cls, routing: Routing, documents: Documents) -> "RoutingStats":
        """The statistics of a routing, with the load-balancing loss of the Switch Transformer (Fedus et al., 2021).

        For each document it is num_experts * sum over experts of (choices per token) * (mean probability).

        transformers' `load_balancing_loss_func` computes it over all tokens of a batch, so that training depends on the
        batching of documents, and over all layers as if they shared their experts. For one document and one layer, both
        are equal. Divide the sum by the supervised tokens of the step, like the loss. Only the probabilities have
        gradients.
        """
        whole = documents.whole
        lengths, supervised = whole.boundaries.diff(), whole.num_supervised
        num_experts = routing.probabilities.shape[1]
        choices = torch.zeros_like(routing.probabilities).scatter(1, routing.experts, 1.0)
        entropy = torch.special.entr(routing.probabilities.detach()).sum(dim=1, keepdim=True)
        tokens = torch.cat([choices, routing.probabilities, entropy], dim=1)
        load, probability, entropies = documents.sums(tokens).split([num_experts, num_experts, 1], dim=1)
        balance = num_experts * (load * probability).sum(dim=1) / lengths.float().square()
        trained = (supervised > 0).float()
        # Not `trained @ load`, which works in place: selective checkpointing does not allow that for a saved tensor.
        return cls((trained[:, None] * load).sum(dim=0), trained @ entropies[:, 0], supervised.float() @ balance)


class RoutingSums:
    """Accumulates the statistics of training forwards on the device, until `take`."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.balance: Tensor | None = None  # of the last forward in training
        self.loss_scale: Callable[[Tensor], Tensor] | None = None  # scales gradients in fp16

    def add(self, layers: list[RoutingStats], documents: Documents) -> None:
        trained = (documents.boundaries.diff() * (documents.num_supervised > 0)).sum()
        common = torch.stack([trained, documents.num_supervised.sum()]).float()
        rows = [torch.cat([load, entropy[None], balance[None], common]).detach() for load, entropy, balance in layers]
        self.rows = torch.stack(rows) if self.rows is None else self.rows + torch.stack(rows)
        self.balance = torch.stack([stats.balance for stats in layers]).mean()

    def charge(self, hidden: Tensor, weight: float, supervised: Tensor | int) -> Tensor:
        """Return `hidden` unchanged, but add the gradient of the last forward's load-balancing loss in its backward.

        The gradient is multiplied by `weight` and divided by the number of `supervised` tokens. The loss that a recipe
        reports remains the cross-entropy.
        """
        balance, self.balance = self.balance, None
        if not weight or balance is None or not torch.is_grad_enabled():
            return hidden
        divisor = supervised.clamp(min=1) if isinstance(supervised, Tensor) else max(1, supervised)
        loss = balance * weight / divisor
        charged: Tensor = _Charged.apply(hidden, self.loss_scale(loss) if self.loss_scale else loss)
        return charged

    def take(self) -> Tensor:
        """Return and reset one row per layer: tokens per expert, entropy, load-balancing loss, tokens, supervised
        tokens."""
        assert self.rows is not None, "no forward in training since the last call"
        rows, self.rows = self.rows, None
        return rows


class _Charged(torch.autograd.Function):
    """Return the first operand; in backward, the second, a scalar loss, gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = {"dtype": loss.dtype, "device": loss.device}
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), **ctx.loss)
