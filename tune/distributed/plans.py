"""Tensor parallelism by a plan, for models that do not declare shared layers: `{pattern: style}`.

A pattern matches the end of the names of layers or parameters in blocks; `*` matches anything between two dots. Styles
come from transformers (`base_model_tp_plan`); the first two are also torch's:

colwise: shares the outputs of a linear layer; later layers compute on a part of them.
rowwise: shares the inputs of a linear layer, as a colwise layer returns them; its outputs are summed.
colwise_gather_output, rowwise_split_input: inputs and outputs are whole; only the weight and the product are shared.
packed_colwise: like colwise, for a weight that concatenates two projections.
replicated_with_grad_allreduce: each process has the whole weight and uses it for its part, such as norms of heads.
moe_tp_experts: a module whose parameters have one of the styles above; its output is summed.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook

from tune.collators import Batch
from tune.distributed.exchanges import Peers
from tune.distributed.shards import local_shard
from tune.distributed.uses import WHOLE, Use, Uses, column, columns_of, parameters_of, require_even, rows_of
from tune.distributed.wrapping import Forward, Wrap, wrap, wrapper_of
from tune.errors import TuneError
from tune.lookup import did_you_mean

COLUMNS = ("colwise", "colwise_gather_output", "packed_colwise")
ROWS = ("rowwise", "rowwise_split_input")
LATENT = "mla_kv_a_proj"  # latents, of which heads have shares, followed by the rotated keys that all heads share
STYLES = (*COLUMNS, *ROWS, "replicated_with_grad_allreduce", "moe_tp_experts", LATENT)
HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads")  # fields of configs


class SharingPlan:
    """The uses of the parameters of `blocks` of `model` by a plan. It wraps the forwards of their layers to exchange
    data, and each block with itself.

    Raises:
        TuneError: a pattern matches nothing, a style is unknown or does not fit, or the number of processes does not
            divide widths or heads.
    """

    def __init__(self, model: Any, blocks: list[nn.Module], mesh: DeviceMesh, given: Mapping[str, str] | None):
        plan = given or getattr(model, "tp_plan", None)
        if not plan:
            raise TuneError(
                f"parallel.tp: {type(getattr(model, 'body', model)).__name__} has no tensor-parallel plan. Set "
                "parallel.plan, such as {layers.*.mlp.up_proj: colwise, layers.*.mlp.down_proj: rowwise}, or set "
                "parallel.tp=1"
            )
        self.mesh, self.peers, self.config = mesh, Peers.of(mesh), getattr(model, "config", None)
        self.is_off = False
        self.last: tuple[Tensor | None, Any] = None, None
        self.uses: Uses = {}
        self.seen: list[Uses] = []  # the uses of each block
        self.adapted_inputs: list[Any] = []  # layers with adapters whose inputs are shared
        self.counts: dict[str, tuple[str, int]] = {}
        places = _places(model, blocks)
        styles: dict[str, tuple[str, str]] = {}
        for pattern, style in plan.items():
            if style not in STYLES and not given:
                raise TuneError(
                    f"parallel.tp: transformers' plan for {type(getattr(model, 'body', model)).__name__} has the "
                    f"unsupported style {style!r} for {pattern}; supported: {', '.join(STYLES)}. Set parallel.plan, or "
                    "set parallel.tp=1"
                )
            if style not in STYLES:
                raise TuneError(
                    f"parallel.plan: {pattern} has the unknown style {style!r}; known: {', '.join(STYLES)}."
                    f"{did_you_mean(str(style), STYLES)}"
                )
            form = re.compile(r"(.*\.)?" + re.escape(pattern).replace(r"\*", r"[^.]+"))
            matching = [name for name in places if form.fullmatch(name)]
            if given and not matching:
                names = ", ".join([name for name, (_, kind) in places.items() if not kind][:3])
                raise TuneError(
                    f"parallel.plan: {pattern} matches no layer in a block of {type(model).__name__}. Names look like "
                    f"{names}; embedding and head need no plan"
                )
            styles |= dict.fromkeys(matching, (pattern, style))
        if not styles:
            raise TuneError(f"parallel.tp: the plan of {type(model).__name__} matches no layer. Set parallel.plan")
        for name, (pattern, style) in styles.items():
            self._count(*places[name], pattern, style)
        require_even(self.counts, mesh.size())
        for name, (_, style) in styles.items():
            self._apply(*places[name], name, style)
        for block in blocks:
            wrap(block, Wrap.PLAN, self)

    def _count(self, module: Any, kind: str, pattern: str, style: str) -> None:
        """Record the counts that `style` shares of a module, or of its parameter `kind`."""
        if style not in COLUMNS + ROWS:
            return
        if not kind and not isinstance(module, nn.Linear):
            raise TuneError(f"parallel.plan: {pattern}: {style} is for nn.Linear; found {type(module).__name__}")
        shape = getattr(module, kind).shape if kind else (module.out_features, module.in_features)
        width = shape[-1] if style in ROWS else shape[max(len(shape) - 2, 0)]
        width //= 2 if style == "packed_colwise" else 1
        self.counts[f"{pattern} ({width} {'inputs' if style in ROWS else 'outputs'})"] = "", width
        if style in ("colwise", "rowwise") and not kind:
            queries, hidden = (getattr(self.config, field, None) for field in (HEADS[0], "hidden_size"))
            head_dim = getattr(self.config, "head_dim", None) or (hidden // queries if hidden and queries else 0)
            for field in HEADS:
                if (heads := getattr(self.config, field, None)) and width == heads * head_dim:
                    self.counts[f"{field}={heads}"] = "", heads

    def _apply(self, module: Any, kind: str, name: str, style: str) -> None:
        parts = 2 if style == "packed_colwise" else 1
        if kind:
            parameter = getattr(module, kind)
            use = Use(parameter.ndim - 1 if style in ROWS else None, part=True)
            if style in COLUMNS:
                dim = max(parameter.ndim - 2, 0)
                use = column(parameter, dim, [parameter.shape[dim] // parts] * parts, self.mesh)
            self.uses[module, kind] = use
            return
        if style not in ("moe_tp_experts", LATENT):
            self.uses |= {(owner, name): Use(part=True) for owner, name, _ in parameters_of(module)}
        if style in COLUMNS:
            self.uses |= columns_of(module, [module.out_features // parts] * parts, self.mesh)
        elif style in ROWS:
            self.uses |= rows_of(module, name, self.mesh)
            self.adapted_inputs += [module] if hasattr(module, "input_group") else []
        if style != "replicated_with_grad_allreduce":
            wrap(module, Wrap.EXCHANGE, functools.partial(self._exchanging, style))

    def _exchanging(self, style: str, forward: Forward) -> Forward:
        peers = self.peers

        def before(argument: Any) -> Any:
            if not isinstance(argument, Tensor) or not argument.is_floating_point() or style == "rowwise":
                return argument
            return peers.own(argument, dim=-1) if style == "rowwise_split_input" else self._copied(argument)

        def exchanging(*args: Any, **kwargs: Any) -> Any:
            if self.is_off:
                return forward(*args, **kwargs)
            if style == LATENT:
                output = forward(*args, **kwargs)
                rotated = cast(Any, self.config).qk_rope_head_dim
                return torch.cat([output[..., :-rotated], peers.copied(output[..., -rotated:])], dim=-1)
            output = forward(*map(before, args), **{name: before(value) for name, value in kwargs.items()})
            if style == "colwise_gather_output":
                return peers.whole(output, dim=-1)
            return output if style in COLUMNS else peers.summed(output)

        return exchanging

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return a copy that consecutive layers reading the same tensor share, for a single sum in backward."""
        source, copy = self.last
        if source is not tensor:
            copy = self.peers.copied(tensor)
            self.last = tensor, copy
        return copy

    def __call__(self, forward: Forward) -> Forward:
        """Wrap the `forward` of a block so that no tensor is kept after it."""

        def forgetting(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:
                self.last = None, None

        return forgetting

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which each process computes whole blocks."""
        before = [dict(uses) for uses in self.seen]
        for uses in self.seen:
            uses |= {key: Use(use.dim, None if use.dim is None else WHOLE) for key, use in uses.items()}
        for layer in self.adapted_inputs:
            layer.input_group = None
        self.is_off = True
        try:
            yield
        finally:
            self.is_off = False
            for layer in self.adapted_inputs:
                layer.input_group = self.peers.group
            for uses, own in zip(self.seen, before, strict=True):
                uses |= own


def _places(model: nn.Module, blocks: list[nn.Module]) -> dict[str, tuple[nn.Module, str]]:
    """Return the modules in `blocks` and their parameters, by name, as (module, name of the parameter or "")."""
    inside = {module for block in blocks for module in block.modules() if module is not block}
    places = {}
    for name, module in model.named_modules():
        if module in inside:
            places[name] = module, ""
            places |= {
                f"{name}.{kind}": (module, kind)
                for kind, parameter in module._parameters.items()
                if parameter is not None
            }
    return places


def check_plan(model: Any) -> None:
    """Check a plan: compare hidden states and gradients for a few tokens with those from whole blocks on each process.
    All processes must call this after weights are loaded.

    Raises:
        TuneError: the model computes something else with its plan.
    """
    plan = next((plan for module in model.modules() if (plan := wrapper_of(module, Wrap.PLAN))), None)
    if plan is None:
        return
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    device, training = next(model.parameters()).device, model.training
    tokens = ((torch.arange(16) * 7 + 3) % model.config.vocab_size)[None]
    batch = Batch.of(tokens, tokens).to(device)
    model.eval()
    results = []
    for context in (nullcontext, plan.off):
        kept: list[Tensor] = []
        entered: list[nn.Module] = []

        def probe(hidden: Tensor, weight: Tensor, batch: Batch, kept: list[Tensor] = kept, **_: Any) -> Tensor:
            kept.append(hidden.detach())
            return (hidden.float() * torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden)).sum()

        hook = register_module_forward_pre_hook(lambda module, _, to=entered: to.append(module))
        try:
            with context():
                result = model(batch, probe)
                if result.requires_grad:
                    result.backward()
        except RuntimeError as error:
            at = next(name for name, module in model.named_modules() if module is entered[-1])
            raise TuneError(
                f"parallel.plan: the model fails with it at {at}: {error}. Outputs of a colwise layer must go to "
                "a rowwise layer; layers without a style need whole inputs"
            ) from error
        finally:
            hook.remove()
        norms = torch.zeros(len(trained), device=device)
        for index, (_, parameter) in enumerate(trained):
            if parameter.grad is not None:
                norms[index] = torch.linalg.vector_norm(local_shard(parameter.grad)[0], dtype=torch.float32)
                parameter.grad = None
        results.append((kept[0], norms))
    model.train(training)
    (hidden, mine), (whole, theirs) = results
    apart = (mine - theirs).abs() / theirs.maximum(theirs.mean() * 1e-3).clamp(min=1e-12)
    apart = torch.cat([apart, ((hidden - whole).float().norm() / whole.float().norm())[None]])
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    is_wrong = ~(apart < (1e-2 if hidden.dtype == torch.float32 else 0.2))
    if is_wrong.any():
        # If hidden states are wrong, so are all gradients.
        worst = len(trained) if is_wrong[-1] else int(apart.argmax())
        what = "its hidden states differ" if is_wrong[-1] else f"the gradient of {trained[worst][0]} differs"
        raise TuneError(
            f"parallel.plan: the model computes something else with this plan: {what} by {apart[worst]:.0%} from one "
            "process. Check: only weights between colwise and rowwise layers need replicated_with_grad_allreduce; "
            "packed_colwise is for two projections in one weight; a forward must infer the number of heads from its "
            "input, as view(..., -1, head_dim) does"
        )
