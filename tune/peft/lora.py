"""LoRA (Hu et al., 2021), rsLoRA (Kalajdzievski, 2023) and DoRA (Liu et al., 2024), computed as PEFT computes them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.distributed import full_tensor
from tune.errors import TuneError
from tune.peft.dropout import dropout, prepare_dropout
from tune.quantization import NF4Weight
from tune.types import Fraction, PositiveFloat, PositiveInt

T = TypeVar("T")


@dataclass(frozen=True)
class LoRA:
    """Which layers get an adapter, of what kind, and what else of the model is trained.

    `target_modules` is `all-linear` (all but the head and, with experts, the feed-forward parts), a list of names,
    or a regular expression that must match a layer's whole name; linear layers and embeddings can be adapted. Names may
    be ours (`query`) or the checkpoint's (`q_proj`). The patterns give other ranks and alphas to the layers whose name
    ends with, or is matched by, a key.
    The modules named in `modules_to_save` are trained whole, and of the embedding and the head the rows of the
    `trainable_tokens`.

    `init` says where the adapters start. All starts leave the model as it was: `pissa` (Meng et al., 2024) at the
    largest singular vectors of the weight, `olora` (Büyükakyüz, 2024) at the first columns of its QR decomposition,
    both less a frozen copy of that start. An exported adapter holds that copy too and has twice the rank.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Fraction = 0.0
    target_modules: list[str] | str = "all-linear"
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_stabilized: bool = False  # scale by alpha / sqrt(rank) and not alpha / rank
    dora: bool = False  # learn the magnitude of the weight's rows apart from their direction
    init: Literal["default", "pissa", "olora"] = "default"
    modules_to_save: list[str] = field(default_factory=list)
    trainable_tokens: list[int] = field(default_factory=list)
    exists: bool = False  # in files: no rank of it is changed or refused

    def at(self, *names: str) -> tuple[int, float]:
        """Rank and alpha of the layer of these names, looked up in the patterns as PEFT does."""
        return _by_pattern(self.rank_pattern, names, self.rank), _by_pattern(self.alpha_pattern, names, self.alpha)

    def scaling(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def state_dict(self) -> dict[str, Any]:
        """Settings that decide what the trained parameters mean, and that their names and shapes do not show."""
        names = ("rank", "alpha", "alpha_pattern", "rank_stabilized", "init", "trainable_tokens")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore. Raises TuneError if the state is that of another adapter."""
        now = self.state_dict()
        changed = [f"{name} was {state[name]} and is now {now[name]}" for name in now if state[name] != now[name]]
        if changed:
            raise TuneError(
                f"resume: the checkpoint was made with another adapter: {'; '.join(changed)}. Restore these settings, "
                "or start anew with resume=never and another output_dir"
            )


class LoRALinear(nn.Linear):
    """A linear layer whose weight W is used as W + scaling * B @ A, or with `magnitude`, as that scaled to row norms m.

    `lora_a` is `[rank, in_features]`, `lora_b` `[out_features, rank]`; with `start_a` and `start_b` of these shapes
    B @ A is less their product. Made from a linear layer in place: the layer keeps its name, its weight and its place
    in the model.
    """

    PARTS: ClassVar = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
    casts_parameters: ClassVar = True

    weight: nn.Parameter | NF4Weight  # type: ignore[assignment]
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    start_a: nn.Parameter | None
    start_b: nn.Parameter | None
    magnitude: nn.Parameter | None
    trains_in_fp32: bool  # in bf16 a magnitude moves in steps of 0.4 to 0.8%
    rank: int
    alpha: float
    scaling: float
    dropout: float
    dropout_keys: Tensor | None
    layer_seed: Tensor
    init: str

    @classmethod
    def adapt(cls, linear: nn.Linear, name: str, rank: int, alpha: float, lora: LoRA) -> None:
        linear.__class__ = cls
        assert isinstance(linear, LoRALinear)
        if isinstance(linear.weight, NF4Weight):
            device, dtype = linear.weight.codes.device, torch.float32
        else:
            device, dtype = linear.weight.device, linear.weight.dtype

        if lora.dora:
            dtype = torch.float32

        def parameter(*shape: int, trained: bool = True) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=trained)

        rows, columns = linear.out_features, linear.in_features
        moved = lora.init != "default"
        linear.lora_a, linear.lora_b = parameter(rank, columns), parameter(rows, rank)
        linear.start_a = parameter(rank, columns, trained=False) if moved else None
        linear.start_b = parameter(rows, rank, trained=False) if moved else None
        linear.magnitude = parameter(rows) if lora.dora else None
        linear.trains_in_fp32 = lora.dora
        linear.rank, linear.alpha, linear.scaling = rank, alpha, lora.scaling(rank, alpha)
        linear.init = lora.init
        prepare_dropout(linear, name, lora.dropout)

    def start(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Where the parameters start, in full: A uniform as in `nn.Linear` and B zero, or as `init` says."""
        if self.init == "default":
            bound = 1 / math.sqrt(self.in_features)
            a = torch.empty(self.lora_a.shape).uniform_(-bound, bound, generator=generator)
            start = {"lora_a": a, "lora_b": torch.zeros(self.lora_b.shape)}
        else:
            b, a = FACTORS[self.init](self._full_weight().cpu(), self.rank, self.scaling, generator)
            assert self.start_a is not None
            a, b = (factor.to(self.start_a.dtype) for factor in (a, b))  # so that both are equal in their own types
            start = {"lora_a": a, "lora_b": b, "start_a": a, "start_b": b}
        return start if self.magnitude is None else start | {"magnitude": self._full_weight().norm(dim=1)}

    def forward(self, input: Tensor) -> Tensor:
        dropped = self._dropped(input)
        a, b = (factor.to(input.dtype) for factor in self._factors())
        low_rank = F.linear(dropped, a) * self.scaling
        base = self._base(input)
        if self.magnitude is None:  # one product onto the other: little that is as wide as the output is made beside it
            flat = base.reshape(-1, self.out_features), low_rank.reshape(-1, low_rank.shape[-1])
            return torch.addmm(*flat, b.T).view(base.shape)
        ratio = self._ratio(self.magnitude)
        direction = base if dropped is input else self._base(dropped)
        if self.bias is not None:
            direction = direction - self.bias
        return (base + (ratio - 1) * direction + ratio * F.linear(low_rank, b)).to(base.dtype)

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and weight whose product is `forward`, for a loss that takes it by parts: of a head without bias."""
        assert isinstance(self.weight, Tensor)
        dropped = self._dropped(hidden)
        a, b = (factor.to(hidden.dtype) for factor in self._factors())
        low_rank = F.linear(dropped, a) * self.scaling
        if self.magnitude is None:
            return torch.cat([hidden, low_rank], dim=-1), torch.cat([self.weight, b], dim=1)
        ratio = self._ratio(self.magnitude)[:, None]
        if dropped is hidden:
            return torch.cat([hidden, low_rank], dim=-1), (ratio * torch.cat([self.weight, b], dim=1)).to(hidden.dtype)
        inputs = torch.cat([hidden, dropped, low_rank], dim=-1)
        return inputs, torch.cat([self.weight, (ratio - 1) * self.weight, ratio * b], dim=1).to(hidden.dtype)

    def _base(self, input: Tensor) -> Tensor:
        if not isinstance(self.weight, NF4Weight):
            return F.linear(input, self.weight, self.bias)
        return self.weight.linear(input) if self.bias is None else self.weight.linear(input) + self.bias

    def _dropped(self, input: Tensor) -> Tensor:
        if not (self.dropout and self.training):
            return input
        assert self.dropout_keys is not None, "set_dropout_keys must come before a forward in training"
        keys = self.dropout_keys.view(input.shape[:-1])  # some models flatten rows before their linear layers
        return dropout(input, self.dropout, keys, self.layer_seed)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """A and B whose product is what training has added, in their own type."""
        if self.start_a is None or self.start_b is None:
            return self.lora_a, self.lora_b
        return torch.cat([self.lora_a, self.start_a]), torch.cat([self.lora_b, -self.start_b], dim=1)

    def _ratio(self, magnitude: Tensor) -> Tensor:
        """By how much each row is longer than W + scaling * B @ A has it, in fp32."""
        with torch.no_grad():  # the norm counts as a constant in backward (section 4.3 of the paper)
            a, b = self._factors()
            base = self.weight
            full = base.dequantize(torch.float32) if isinstance(base, NF4Weight) else base.float()
            norm = torch.addmm(full, b.float(), a.float(), alpha=self.scaling).norm(dim=1)
        return magnitude.float() / norm

    def merged(self, weight: Tensor) -> Tensor:
        """`weight`, the whole base weight, with the adapter in it, in fp32: all processes must call it."""
        a, b = (full_tensor(factor.detach()).to(weight.device, torch.float32) for factor in self._factors())
        merged = torch.addmm(weight.float(), b, a, alpha=self.scaling)
        if self.magnitude is not None:
            magnitude = full_tensor(self.magnitude.detach()).to(merged)
            merged *= (magnitude / merged.norm(dim=1))[:, None]
        return merged

    def _full_weight(self) -> Tensor:
        """The whole base weight in fp32: all processes must call it."""
        return self.weight.full() if isinstance(self.weight, NF4Weight) else full_tensor(self.weight).float()


class LoRAEmbedding(nn.Embedding):
    """An embedding whose weight W is used as W + scaling * (B @ A).T: A is `[rank, rows]`, B `[dim, rank]`."""

    PARTS: ClassVar = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
    casts_parameters: ClassVar = True

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    rank: int
    alpha: float
    scaling: float

    @classmethod
    def adapt(cls, embedding: nn.Embedding, name: str, rank: int, alpha: float, lora: LoRA) -> None:
        embedding.__class__ = cls
        assert isinstance(embedding, LoRAEmbedding)
        weight = embedding.weight
        embedding.lora_a = nn.Parameter(weight.new_empty(rank, embedding.num_embeddings))
        embedding.lora_b = nn.Parameter(weight.new_empty(embedding.embedding_dim, rank))
        embedding.rank, embedding.alpha, embedding.scaling = rank, alpha, lora.scaling(rank, alpha)

    def start(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Where the parameters start, in full: A zero and B normal."""
        return {
            "lora_a": torch.zeros(self.lora_a.shape),
            "lora_b": torch.empty(self.lora_b.shape).normal_(generator=generator),
        }

    def merged(self, weight: Tensor) -> Tensor:
        """As `LoRALinear.merged`."""
        a, b = (full_tensor(each.detach()).to(weight.device, torch.float32) for each in (self.lora_a, self.lora_b))
        return torch.addmm(weight.float(), a.T, b.T, alpha=self.scaling)

    def forward(self, input: Tensor) -> Tensor:
        a, b = (factor.to(self.weight.dtype) for factor in (self.lora_a, self.lora_b))
        return super().forward(input) + F.linear(F.embedding(input, a.T) * self.scaling, b)


def _pissa(weight: Tensor, rank: int, scaling: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """B and A with scaling * B @ A nearest to `weight`, by subspace iteration (Halko et al., 2011)."""
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


def _by_pattern(patterns: Mapping[str, T], names: tuple[str, ...], default: T) -> T:
    for pattern, value in patterns.items():
        if any(matches(pattern, name) for name in names):
            return value
    return default


def matches(pattern: str, name: str) -> bool:
    """Whether the key `pattern` of a rank or alpha pattern is for the layer `name`, as PEFT decides it."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None
