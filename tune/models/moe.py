"""Mixtures of experts: route -> dispatch -> experts -> combine. No token is ever dropped."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tune.distributed import Peers
from tune.models import block_kernels
from tune.models.context import Context
from tune.models.layers import ACTIVATIONS, MLP, MLPConfig
from tune.models.routing import Router, RouterConfig, RoutingStats


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts of width `size`, chosen by `router`, and an optional shared expert of width `shared`.

    `fused` joins gate and up as the first and second half of the outputs, or as even and odd outputs. `transposed`
    weights are `[experts, in, out]`. `clamp` is (alpha, limit) of gpt-oss's activation. `shared_gate` weights the
    shared expert by a sigmoid.
    """

    router: RouterConfig
    size: int
    activation: str = "silu"
    fused: Literal["no", "halves", "interleaved"] = "no"
    bias: bool = False
    transposed: bool = False
    clamp: tuple[float, float] | None = None
    shared: int | None = None
    shared_gate: bool = False

    def build(self, hidden_size: int) -> nn.Module:
        return MixtureOfExperts(self, hidden_size)


class MixtureOfExperts(nn.Module):
    expert_mesh: DeviceMesh | None = None  # the processes that share the experts

    def __init__(self, config: ExpertsConfig, hidden_size: int):
        super().__init__()
        self.router = Router(config.router, hidden_size)
        self.experts = Experts(config, hidden_size)
        self.shared = MLPConfig(config.shared, config.activation).build(hidden_size) if config.shared else None
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if config.shared_gate else None

    def forward(self, hidden: Tensor, context: Context) -> tuple[Tensor, RoutingStats | None]:
        """`hidden` `[batch, seq, dim]` -> the same shape and, in training, the statistics of the router."""
        tokens = hidden.flatten(0, 1)
        routing = self.router(tokens)
        plan = Dispatch.of(routing.experts, self.router.config.num_experts)
        rows = dispatch(tokens, plan)
        mesh = self.expert_mesh
        rows = self.experts(rows, plan) if mesh is None else on_processes(mesh, self.experts, rows, plan)
        output = combine(rows, routing.weights, plan).view_as(hidden)
        if self.shared is not None:
            shared = self.shared(hidden, context)
            output = output + (shared if self.shared_gate is None else self.shared_gate(hidden).sigmoid() * shared)
        if not self.training or context.documents is None:
            return output, None
        return output, RoutingStats.of(routing, context.documents)


class Dispatch(NamedTuple):
    """The rows of experts: the choices `[tokens * chosen]` of all tokens, sorted by expert.

    Row i is choice `order[i]`. Choice j is row `places[j]` and belongs to token j // `chosen`. The rows of expert e end
    before `ends[e]`. The first expert of this process is `first`; `moved` describes where its rows come from.
    """

    order: Tensor
    places: Tensor
    ends: Tensor
    chosen: int
    first: int = 0
    moved: "Moved | None" = None

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> "Dispatch":
        """Make the plan for the `experts` `[tokens, chosen]` of each token."""
        by_expert, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(num_experts, device=experts.device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)  # bincount would synchronize
        return cls(order, order.argsort(), ends, experts.shape[1])

    def of_tokens(self, values: Tensor) -> Tensor:
        """For each row, the value of its token, from `values` `[tokens]`."""
        if self.moved is not None:
            values = self.moved.there(self.moved.plan.of_tokens(values))
        return values[self.order // self.chosen]

    @property
    def experts(self) -> Tensor:
        """The expert of each row."""
        return torch.searchsorted(self.ends, torch.arange(len(self.order), device=self.ends.device), right=True)


def dispatch(tokens: Tensor, plan: Dispatch) -> Tensor:
    """Copy `tokens` `[tokens, dim]` to rows `[tokens * chosen, dim]`, sorted by expert."""
    return _Reorder.apply(tokens, plan.order, plan.places, plan.chosen)


def combine(rows: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
    """The sum of each token's rows, weighted by `weights` `[tokens, chosen]`: `[tokens, dim]`."""
    choices = _Reorder.apply(rows, plan.places, plan.order, 1).unflatten(0, weights.shape)
    return torch.bmm(weights.to(rows.dtype)[:, None], choices)[:, 0]


class Moved(NamedTuple):
    """Rows of `plan` that move to other `peers`: the number `sent` to each, and `received` from each."""

    plan: Dispatch
    sent: list[int]
    received: list[int]
    peers: Peers

    def there(self, rows: Tensor) -> Tensor:
        return self.peers.sent(rows, self.sent, self.received)


@torch._disable_dynamo  # its sizes depend on the data; torch.compiler.disable would import the compiler here
def on_processes(mesh: DeviceMesh, experts: nn.Module, rows: Tensor, plan: Dispatch) -> Tensor:
    """The outputs of all experts for the `rows` of `plan`. Each process of `mesh` has a part of them, `experts`."""
    peers, count = Peers.of(mesh), len(plan.ends) // mesh.size()
    counts = plan.ends.diff(prepend=plan.ends.new_zeros(1))
    arriving = peers.sent(counts, [count] * peers.size, [count] * peers.size)
    if hasattr(counts, "fake_mode"):  # fake tensors have no values: all processes get equally many rows
        sent = received = [len(rows) // peers.size + (rank < len(rows) % peers.size) for rank in range(peers.size)]
    else:  # the only wait for the device in a forward, for the sizes to exchange
        sent, received = torch.stack([counts, arriving]).view(2, peers.size, count).sum(dim=2).tolist()
    moved = Moved(plan, sent, received, peers)
    numbers = torch.arange(count, device=rows.device).repeat(peers.size)
    numbers = numbers.repeat_interleave(arriving, output_size=sum(received))
    mine = Dispatch.of(numbers[:, None], count)._replace(first=peers.rank * count, moved=moved)
    output = experts(dispatch(moved.there(rows), mine), mine)
    return peers.sent(_Reorder.apply(output, mine.places, mine.order, 1), received, sent)


class _Reorder(torch.autograd.Function):
    """output[i] = rows[order[i] // copies]. Backward gathers too; torch's would scatter, slowly or in random order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = copies
        return rows[order // copies if copies > 1 else order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[places].unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None


class Experts(nn.Module):
    """One gated feed-forward network per expert."""

    rows = ("down",)

    def __init__(self, config: ExpertsConfig, hidden_size: int):
        super().__init__()
        self.config = config

        def projection(inputs: int, outputs: int) -> ExpertLinear:
            layer = ExpertLinear(config.router.num_experts, inputs, outputs, config.bias, config.transposed)
            layer.activated_share = config.router.chosen / config.router.num_experts
            return layer

        if config.fused == "no":
            self.gate, self.up = (projection(hidden_size, config.size) for _ in range(2))
        else:
            self.gate_up = projection(hidden_size, 2 * config.size)
        self.down = projection(config.size, hidden_size)

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        return {"gate_up": ("size",)} if self.config.fused == "interleaved" else MLP.columns

    def forward(self, rows: Tensor, plan: Dispatch) -> Tensor:
        if self.config.fused == "no":
            gate, up = self.gate(rows, plan), self.up(rows, plan)
        elif self.config.fused == "halves":
            gate, up = self.gate_up(rows, plan).chunk(2, dim=-1)
        else:
            gate, up = self.gate_up(rows, plan).unflatten(-1, (-1, 2)).unbind(-1)
        if self.config.clamp is None and self.config.activation == "silu":
            return self.down(block_kernels.silu_product(gate, up), plan)
        if self.config.clamp is None:
            return self.down(ACTIVATIONS[self.config.activation](gate) * up, plan)
        alpha, limit = self.config.clamp
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.down((up + 1) * gate * torch.sigmoid(alpha * gate), plan)


class ExpertLinear(nn.Module):
    """One linear layer per expert: `weight` `[experts, out, in]`, or `[experts, in, out]` if `transposed`.

    `activated_share` is the share of experts that a token uses.
    """

    activated_share = 1.0

    def __init__(self, num_experts: int, in_features: int, out_features: int, bias: bool, transposed: bool):
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.transposed = transposed
        shape = (in_features, out_features) if transposed else (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(num_experts, *shape))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if bias else None

    def forward(self, rows: Tensor, plan: Dispatch) -> Tensor:
        """`rows` `[rows, in]` sorted by expert -> `[rows, out]`."""
        output = grouped_product(rows, self.weight if self.transposed else self.weight.mT, plan.ends)
        return output if self.bias is None else output + self.bias[plan.experts]


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`rows` `[rows, in]` times `weight` `[groups, in, out]` -> `[rows, out]`. Rows of group g end before `ends[g]`."""
    return F.grouped_mm(rows, weight, offs=ends) if _fits(rows, weight) else product_by_group(rows, weight, ends)


def _fits(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch has a kernel for this product. On other GPUs, torch computes and waits for one group at a time."""
    is_traced = torch.compiler.is_compiling() or hasattr(rows, "fake_mode")  # torch only supports bf16 there
    needs_bf16 = is_traced or rows.is_cuda
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    if not aligned or not len(rows) or (needs_bf16 and rows.dtype != torch.bfloat16):
        return False
    if rows.is_cuda and not torch.version.hip:
        return torch.cuda.get_device_capability(rows.device) in KERNELS
    return rows.device.type in ("cpu", "cuda")


KERNELS = ((9, 0), (10, 0))  # compute capabilities with torch's grouped products


# A custom operator, since the sizes of groups depend on the data and torch.compile must not trace them.
@torch.library.custom_op("tune::product_by_group", mutates_args=())
def product_by_group(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if block_kernels.has_products(rows):
        return block_kernels.grouped_product(rows, weight, ends)
    parts = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


@torch.library.custom_op("tune::product_by_group_weight", mutates_args=())
def _weight_gradient(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    if block_kernels.has_products(rows):
        return block_kernels.grouped_product_weight(rows, gradient, ends)
    starts = ends[:-1].tolist()
    pairs = zip(rows.tensor_split(starts), gradient.tensor_split(starts), strict=True)
    return torch.stack([part.T @ its_gradient for part, its_gradient in pairs])


@product_by_group.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[2])


@_weight_gradient.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), rows.shape[1], gradient.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    of_rows, of_weight, _ = ctx.needs_input_grad
    return (
        product_by_group(gradient, weight.mT, ends) if of_rows else None,
        _weight_gradient(rows, gradient, ends) if of_weight else None,
        None,
    )


product_by_group.register_autograd(_backward, setup_context=_save)
