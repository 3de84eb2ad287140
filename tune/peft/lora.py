"""LoRA (Hu et al., 2021), rsLoRA (Kalajdzievski, 2023) and DoRA (Liu et al., 2024), computed like in PEFT."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from tune import fused
from tune.distributed import full_tensor, summed
from tune.errors import TuneError
from tune.models import Dispatch, ExpertLinear, Router, Routing, grouped_product
from tune.peft import adapter_kernels, products
from tune.peft.dropout import THIRD, Mask, dropout, mix, prepare_dropout
from tune.peft.products import AdaptedProduct
from tune.quantization import NF4Linear, NF4Weight, Rounding
from tune.types import Fraction, PositiveFloat, PositiveInt, checked


@checked
@dataclass(frozen=True)
class LoRA:
    """The settings of an adapter: the layers that get one, its kind, and further trained parameters. Has no weights.

    `target_modules` is `all-linear` (all but the head and, in a model with experts, the feed-forward layers), a list of
    names, or a regular expression that must match a layer's whole name. Linear layers, experts and embeddings can be
    adapted. Names are ours (`query`) or the checkpoint's (`q_proj`). `target_parameters` are further weights, by the
    ends of their names in transformers, as in PEFT: experts are `gate_up_proj`, where gate and up share their A, and
    `down_proj`; a router is `gate.weight`. `rank_pattern` and `alpha_pattern` set the rank
    and alpha of layers whose name ends with a key or matches it. The modules in `modules_to_save` are trained in full.
    The rows of `trainable_tokens` are trained in embedding and head, or in the modules that it names, as
    `{embed_tokens: [5, 6]}`.

    `init` sets the initial values: `pissa` (Meng et al., 2024) takes them from the weight's largest singular vectors,
    `olora` (Büyükakyüz, 2024) from the first columns of its QR decomposition. A frozen copy of them is subtracted, so
    that the model first computes the same as without an adapter. An exported adapter includes the copy, at twice the
    rank.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Fraction = 0.0
    target_modules: list[str] | str = "all-linear"
    target_parameters: list[str] = field(default_factory=list)
    rank_pattern: dict[str, PositiveInt] = field(default_factory=dict)
    alpha_pattern: dict[str, PositiveFloat] = field(default_factory=dict)
    rank_stabilized: bool = False  # scale by alpha / sqrt(rank) instead of alpha / rank
    dora: bool = False  # learn the magnitude of the weight's rows separately from their direction
    init: Literal["default", "pissa", "olora"] = "default"
    modules_to_save: list[str] = field(default_factory=list)
    trainable_tokens: list[int] | dict[str, list[int]] = field(default_factory=list)
    path: str | None = None  # folder of an existing adapter, whose ranks are neither changed nor checked

    def at(self, *names: str) -> tuple[int, float]:
        """The rank and alpha of a layer with these names, by the first pattern that matches one, as in PEFT."""

        def first(patterns: dict[str, Any], default: Any) -> Any:
            return next((patterns[each] for each in patterns if any(matches(each, name) for name in names)), default)

        return first(self.rank_pattern, self.rank), first(self.alpha_pattern, self.alpha)

    def scaling(self, rank: int, alpha: float) -> float:
        """The adapter's scaling factor."""
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def state_dict(self) -> dict[str, Any]:
        """Settings that change what the model computes, but not the names and shapes of its parameters."""
        names = ("rank", "alpha", "alpha_pattern", "rank_stabilized", "init", "trainable_tokens")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the settings; restores nothing. Raises TuneError if the state belongs to another adapter."""
        now = self.state_dict()
        # The first pattern that matches a layer decides, so the order of patterns counts.
        patterns = [[*each["alpha_pattern"].items()] for each in (state, now)]
        differs = {name for name in now if state[name] != now[name]}
        differs |= {"alpha_pattern"} if patterns[0] != patterns[1] else set()
        changed = [f"{name} was {state[name]} and is now {now[name]}" for name in now if name in differs]
        if changed:
            raise TuneError(
                f"resume: the checkpoint was made with another adapter: {'; '.join(changed)}. Restore these settings, "
                "or start over with resume=never and another output_dir"
            )


class LowRank(nn.Module):
    """A layer with an adapter: scaling * B @ A is added to its weight, where A is `lora_a` and B is `lora_b`.

    A layer is adapted in place and keeps its name, its weight and its place in the model.
    """

    # Trained parameters -> end of their names in PEFT's files.
    PARTS: ClassVar = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    added: ClassVar[tuple[str, ...]] = (
        "lora_a",
        "lora_b",
        "start_a",
        "start_b",
        "magnitude",
        "dropout_features",
    )  # tensors added to the layer
    casts_parameters: ClassVar = True
    supports_dropout: ClassVar = True
    is_off = False  # compute without the adapter
    first_input = 0  # first input feature of this process
    input_group: str | None = None  # the processes that share the input features

    base: type[nn.Module]  # the class of the layer without adapter
    in_features: int
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    settings: LoRA  # of the adapter; the layer's own rank and alpha may differ
    rank: int
    alpha: float
    scaling: float
    dropout: float
    dropout_keys: Tensor | None
    dropout_features: Tensor

    @classmethod
    def adapt(cls, layer: Any, name: str, rank: int, alpha: float, lora: LoRA) -> None:
        """Add an adapter to the layer `name`. Its parameters are undefined until they are initialized."""
        layer.base, layer.__class__ = type(layer), cls
        layer.settings = lora
        layer.rank, layer.alpha, layer.scaling = rank, alpha, lora.scaling(rank, alpha)
        if cls.supports_dropout:
            prepare_dropout(layer, name, lora.dropout, layer.in_features)
        else:
            prepare_dropout(layer, name, 0.0, 0)
        layer.add_parameters(lora)

    def add_parameters(self, lora: LoRA) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        """Become the original layer again, with its current weight."""
        for name in (*self.added, "dropout_keys", "settings"):
            if hasattr(self, name):
                delattr(self, name)
        self.__class__ = self.base  # type: ignore[assignment]

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial values of the parameters, in full: A uniform as in `nn.Linear`, B zero."""
        bound = 1 / math.sqrt(self.in_features)
        a = torch.empty(self.lora_a.shape).uniform_(-bound, bound, generator=generator)
        return {"lora_a": a, "lora_b": torch.zeros(self.lora_b.shape)}

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B in their own dtype, including the frozen start: their product is zero before training."""
        return self.lora_a, self.lora_b

    def _dropped(self, input: Tensor, keys_of: Callable[[Tensor], Tensor]) -> Tensor:
        """`input` with dropout. `keys_of` maps the random bits of the batch's tokens to those of the rows of `input`.

        Without these bits, torch's generator draws the dropout.
        """
        if not self._drops:
            return input
        if self.dropout_keys is None:
            return F.dropout(input, self.dropout)
        return dropout(input, self.dropout, keys_of(self.dropout_keys), self._features(input))

    @property
    def _drops(self) -> bool:
        return self.dropout > 0 and self.training

    def _features(self, input: Tensor) -> Tensor:
        """The random bits of the features of `input`, which with tensor parallelism are a part of all features."""
        return self.dropout_features[self.first_input : self.first_input + input.shape[-1]]

    def full_factors(self, device: torch.device) -> list[Tensor]:
        """`factors` in full, in fp32. All processes must call this."""
        return [full_tensor(factor.detach()).to(device, torch.float32) for factor in self.factors()]


class LoRALinear(LowRank, nn.Linear):
    """A linear layer that uses W + scaling * B @ A as its weight; `magnitude`, if any, sets the norms of its rows.

    `lora_a` is `[rank, in_features]`, `lora_b` `[out_features, rank]`. If there are `start_a` and `start_b`, frozen and
    of the same shapes, their product is subtracted from B @ A.
    """

    PARTS: ClassVar = {**LowRank.PARTS, "magnitude": "lora_magnitude_vector"}

    weight: nn.Parameter | NF4Weight  # type: ignore[assignment]
    start_a: nn.Parameter | None
    start_b: nn.Parameter | None
    magnitude: nn.Parameter | None
    rounding: Rounding | None = None  # applied to the weight with the adapter merged in
    trains_in_fp32: bool  # in bf16, a magnitude changes in steps of 0.4 to 0.8%
    init: str

    def add_parameters(self, lora: LoRA) -> None:
        is_quantized = isinstance(self.weight, NF4Weight)
        like = self.weight.scales if isinstance(self.weight, NF4Weight) else self.weight
        dtype = torch.float32 if is_quantized or lora.dora else like.dtype

        def parameter(*shape: int, trained: bool = True) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=like.device, dtype=dtype), requires_grad=trained)

        rows, columns, moved = self.out_features, self.in_features, lora.init != "default"
        self.lora_a, self.lora_b = parameter(self.rank, columns), parameter(rows, self.rank)
        self.start_a = parameter(self.rank, columns, trained=False) if moved else None
        self.start_b = parameter(rows, self.rank, trained=False) if moved else None
        self.magnitude = parameter(rows) if lora.dora else None
        self.trains_in_fp32, self.init = lora.dora, lora.init

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The initial values of `LowRank`, or those of `init`; the magnitude is the norm of the weight's rows."""
        if self.start_a is None:
            start = super().initial_values(generator)
        else:
            b, a = FACTORS[self.init](self._full_weight().cpu(), self.rank, self.scaling, generator)
            a, b = (factor.to(self.start_a.dtype) for factor in (a, b))  # so that both are equal in their own dtype
            start = {"lora_a": a, "lora_b": b, "start_a": a, "start_b": b}
        return start if self.magnitude is None else start | {"magnitude": self._full_weight().norm(dim=1)}

    def forward(self, input: Tensor) -> Tensor:
        if self.is_off:
            return self._base(input)
        if self.rounding is not None:
            assert isinstance(self.weight, Tensor)
            weight = self.rounding(self._merged(self.weight, *self.factors(), self.magnitude))
            return F.linear(input, weight.to(input.dtype), self.bias)
        if torch.compiler.is_compiling() or products.is_watched() or not self._is_plain:
            return self._by_operations(input)
        return products.outputs_of(self._parts([self], input), input)[0]

    @staticmethod
    def outputs(input: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        """The outputs of `layers`, which all read `input`. Adapted layers are computed together unless observed."""
        if torch.compiler.is_compiling() or products.is_watched() or _has_any_global_hook():
            return [layer(input) for layer in layers]
        joined = [each for each in layers if isinstance(each, LoRALinear) and each._is_plain and not each._is_observed]
        if len({layer._drops and layer.dropout for layer in joined}) != 1:
            return [layer(input) for layer in layers]
        found = iter(products.outputs_of(LoRALinear._parts(joined, input), input))
        return [next(found) if layer in joined else layer(input) for layer in layers]

    @property
    def _is_plain(self) -> bool:
        """Whether `products.outputs_of` can compute this layer."""
        weight, drops = self.weight, self._drops
        if (
            self.is_off
            or self.rounding is not None
            or (drops and (self.magnitude is not None or self.dropout_keys is None))
        ):
            return False
        if self.base is NF4Linear:
            return True
        return self.base is nn.Linear and not (weight.requires_grad or isinstance(weight, DTensor))

    @property
    def _is_observed(self) -> bool:
        """Whether a call of this layer does more than its `forward`."""
        hooks = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        return bool(hooks) or "forward" in self.__dict__

    @staticmethod
    def _parts(layers: Sequence["LoRALinear"], input: Tensor) -> list[AdaptedProduct]:
        found, keys = [], None
        for layer in layers:
            mask = None
            if layer._drops:  # some models flatten rows before their linear layers
                keys = cast(Tensor, layer.dropout_keys).flatten() if keys is None else keys
                mask = Mask(layer.dropout, keys, layer._features(input))
            weight = layer.weight
            tensors = (weight,) if isinstance(weight, Tensor) else weight.tensors(input.dtype)
            a, b = layer.factors()
            found.append(AdaptedProduct(tensors, layer.bias, a, b, layer.scaling, mask, layer.magnitude, layer._norm))
        return found

    def _by_operations(self, input: Tensor) -> Tensor:
        """Compute by plain operations, for compilers and observed operations. As in PEFT, the magnitude scales the
        input after dropout, and the base uses the whole input."""
        dropped = self._dropped(input, lambda keys: keys.view(input.shape[:-1]))
        a, b = (factor.to(input.dtype) for factor in self.factors())
        base, low_rank = self._base(input), F.linear(dropped, a) * self.scaling
        if self.magnitude is None:
            return torch.addmm(base.flatten(0, -2), low_rank.flatten(0, -2), b.T).view(base.shape)
        ratio = self._ratio(self.magnitude, a, b)
        direction = base if dropped is input else self._base(dropped)
        if self.bias is not None:
            direction = direction - self.bias
        return (base + (ratio - 1) * direction + ratio * F.linear(low_rank, b)).to(base.dtype)

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and weight whose product is `forward` without bias, for a loss that computes it in chunks."""
        assert isinstance(self.weight, Tensor)
        if self.is_off:
            return hidden, self.weight
        dropped = self._dropped(hidden, lambda keys: keys.view(hidden.shape[:-1]))
        a, b = (factor.to(hidden.dtype) for factor in self.factors())
        low_rank = F.linear(dropped, a) * self.scaling
        if self.magnitude is None:
            return torch.cat([hidden, low_rank], dim=-1), torch.cat([self.weight, b], dim=1)
        ratio = self._ratio(self.magnitude, a, b)[:, None]
        if dropped is hidden:
            return torch.cat([hidden, low_rank], dim=-1), (ratio * torch.cat([self.weight, b], dim=1)).to(hidden.dtype)
        inputs = torch.cat([hidden, dropped, low_rank], dim=-1)
        return inputs, torch.cat([self.weight, (ratio - 1) * self.weight, ratio * b], dim=1).to(hidden.dtype)

    def _base(self, input: Tensor) -> Tensor:
        return self.base.forward(self, input)

    def factors(self) -> tuple[Tensor, Tensor]:
        if self.start_a is None or self.start_b is None:
            return self.lora_a, self.lora_b
        return torch.cat([self.lora_a, self.start_a]), torch.cat([self.lora_b, -self.start_b], dim=1)

    @torch.no_grad()
    def _norm(self, a: Tensor, b: Tensor) -> Tensor:
        """The norm of each row of W + scaling * B @ A, in fp32, without computing this matrix.

        For a row w of W and b of B, |w + s bA|^2 is |w|^2 + s b (2 A w + s A A^T b).
        """
        weight = self.weight.dequantize(a.dtype) if isinstance(self.weight, NF4Weight) else self.weight
        crossed, gram, b = _precise_product(weight, a.T), _precise_product(a, a.T), b.to(_precise(b))
        crossed = torch.addmm(crossed, b, gram, beta=2, alpha=self.scaling)
        if fused.fits(weight):
            square = adapter_kernels.squared_norms(weight, b, crossed, self.scaling)
        else:
            square = torch.linalg.vector_norm(weight, dim=1, dtype=_precise(weight)).square()
            square = square + self.scaling * (b * crossed).sum(dim=1)
        return (square if self.input_group is None else summed(square, self.input_group)).sqrt()

    def _ratio(self, magnitude: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The magnitude divided by the norm of each row of W + scaling * B @ A, in fp32. The norm is a constant in
        backward (section 4.3 of the paper)."""
        return magnitude.float() / self._norm(a, b)

    def merged(self, weight: Tensor) -> Tensor:
        """`weight`, the full base weight, with the adapter merged in, in fp32. All processes must call this."""
        magnitude = None if self.magnitude is None else full_tensor(self.magnitude.detach()).to(weight.device)
        a, b = self.full_factors(weight.device)
        return self._merged(weight, a, b, magnitude)

    def _merged(self, weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None) -> Tensor:
        merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=self.scaling)
        return merged if magnitude is None else merged * (magnitude.float() / merged.detach().norm(dim=1))[:, None]

    def _full_weight(self) -> Tensor:
        """The full base weight in fp32. All processes must call this."""
        return self.weight.full() if isinstance(self.weight, NF4Weight) else full_tensor(self.weight).float()


def _precise_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in fp32 or fp64; on a GPU without a copy of either in this dtype."""
    precise = _precise(left)
    if left.is_cuda and left.dtype == right.dtype != precise:
        return torch.mm(left, right, out_dtype=precise)
    return left.to(precise) @ right.to(precise)


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class LoRAEmbedding(LowRank, nn.Embedding):
    """An embedding whose weight W is used as W + scaling * (B @ A).T: A is `[rank, rows]`, B `[dim, rank]`."""

    PARTS: ClassVar = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
    supports_dropout: ClassVar = False

    def add_parameters(self, lora: LoRA) -> None:
        self.lora_a = nn.Parameter(self.weight.new_empty(self.rank, self.num_embeddings))
        self.lora_b = nn.Parameter(self.weight.new_empty(self.embedding_dim, self.rank))

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial values of the parameters, in full: A zero, B normal."""
        b = torch.empty(self.lora_b.shape).normal_(generator=generator)
        return {"lora_a": torch.zeros(self.lora_a.shape), "lora_b": b}

    def merged(self, weight: Tensor) -> Tensor:
        """See `LoRALinear.merged`."""
        a, b = self.full_factors(weight.device)
        return torch.addmm(weight.float(), a.T, b.T, alpha=self.scaling)

    def forward(self, input: Tensor) -> Tensor:
        if self.is_off:
            return super().forward(input)
        a, b = (factor.to(self.weight.dtype) for factor in (self.lora_a, self.lora_b))
        return super().forward(input) + F.linear(F.embedding(input, a.T) * self.scaling, b)


class LoRAExperts(LowRank, ExpertLinear):
    """A linear layer for each expert that uses W + scaling * B @ A as its weight, with its own A and B.

    `lora_a` is `[experts, rank, in]`, `lora_b` `[experts, out, rank]`, also if W is transposed.
    """

    def add_parameters(self, lora: LoRA) -> None:
        self.lora_a = nn.Parameter(self.weight.new_empty(self.num_experts, self.rank, self.in_features))
        self.lora_b = nn.Parameter(self.weight.new_empty(self.num_experts, self.out_features, self.rank))

    def merged(self, weight: Tensor) -> Tensor:
        """`weight`, of all experts, with their adapters merged in, in its own dtype. All processes must call this."""
        a, b = self.full_factors(weight.device)
        merged = torch.empty_like(weight)
        for into, base, its_a, its_b in zip(merged, weight, a, b, strict=True):  # all experts in fp32 would be large
            added = self.scaling * (its_b @ its_a)
            into.copy_(base.float() + (added.T if self.transposed else added))
        return merged

    def forward(self, rows: Tensor, plan: Dispatch) -> Tensor:
        if self.is_off:
            return super().forward(rows, plan)
        a, b = (factor.to(rows.dtype).mT for factor in (self.lora_a, self.lora_b))
        # The random bits depend on token and expert, not on the place of the row.
        dropped = self._dropped(
            rows, lambda keys: mix(plan.of_tokens(keys.flatten()) ^ ((plan.first + plan.experts.int()) * THIRD))
        )
        low_rank = grouped_product(dropped, a, plan.ends) * self.scaling
        return super().forward(rows, plan) + grouped_product(low_rank, b, plan.ends)


class LoRASecondExperts(LoRAExperts):
    """Experts that use the A of other experts: PEFT adapts gate and up as one weight, with one A."""

    PARTS: ClassVar = {"lora_b": "lora_B.weight"}
    added: ClassVar[tuple[str, ...]] = ("lora_b", "dropout_features")
    first: tuple[LoRAExperts]  # in a tuple, so that it is not registered as a part of this module

    @classmethod
    def adapt_after(cls, first: LoRAExperts, layer: Any, name: str, lora: LoRA) -> None:
        """Add an adapter to the layer `name` that has the A, rank and alpha of `first`."""
        cls.adapt(layer, name, first.rank, first.alpha, lora)
        layer.first = (first,)

    def add_parameters(self, lora: LoRA) -> None:
        self.lora_b = nn.Parameter(self.weight.new_empty(self.num_experts, self.out_features, self.rank))

    @property
    def lora_a(self) -> nn.Parameter:  # type: ignore[override]
        return self.first[0].lora_a

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial values of the parameters, in full: B zero."""
        return {"lora_b": torch.zeros(self.lora_b.shape)}

    def remove(self) -> None:
        super().remove()
        del self.first


class LoRARouter(LowRank, Router):
    """A router whose weight W is used as W + scaling * B @ A: A is `[rank, dim]`, B `[num_experts, rank]`."""

    supports_dropout: ClassVar = False

    def add_parameters(self, lora: LoRA) -> None:
        self.lora_a = nn.Parameter(self.weight.new_empty(self.rank, self.in_features))
        self.lora_b = nn.Parameter(self.weight.new_empty(self.out_features, self.rank))

    def merged(self, weight: Tensor) -> Tensor:
        """See `LoRALinear.merged`."""
        a, b = self.full_factors(weight.device)
        return torch.addmm(weight.float(), b, a, alpha=self.scaling)

    def forward(self, tokens: Tensor) -> Routing:
        if self.is_off:
            return super().forward(tokens)
        change = self.scaling * (self.lora_b @ self.lora_a)
        return self.routing(tokens, self.weight + change.to(self.weight.dtype))


# The layers that can be adapted.
KINDS: dict[Any, type[LowRank]] = {
    nn.Linear: LoRALinear, nn.Embedding: LoRAEmbedding, ExpertLinear: LoRAExperts, Router: LoRARouter,
}  # fmt: skip


def _pissa(weight: Tensor, rank: int, scaling: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The B and A with scaling * B @ A closest to `weight`, by subspace iteration (Halko et al., 2011)."""
    width = min(2 * rank + 16, *weight.shape)
    basis = torch.linalg.qr(weight @ torch.randn(weight.shape[1], width, generator=generator))[0]
    for _ in range(16):
        basis = torch.linalg.qr(weight @ (weight.T @ basis))[0]
    u, s, v = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    root = (s[:rank] / scaling).sqrt()
    return basis @ u[:, :rank] * root, root[:, None] * v[:rank]


def _olora(weight: Tensor, rank: int, scaling: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(weight)
    return q[:, :rank], r[:rank]


FACTORS = {"pissa": _pissa, "olora": _olora}


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern`, a key of `rank_pattern` or `alpha_pattern`, matches the layer `name`, as in PEFT."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None
