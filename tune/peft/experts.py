"""LoRA on the experts of a mixture, one adapter for each of them."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from tune.distributed import full_tensor
from tune.errors import TuneError
from tune.models.grouped_product import grouped_product
from tune.models.moe import Dispatch, ExpertLinear
from tune.peft.dropout import THIRD, dropout, mix, prepare_dropout
from tune.peft.lora import LoRA


class LoRAExperts(ExpertLinear):
    """A linear layer for each expert, whose weight W is used as W + scaling * B @ A, with a B and an A of its own.

    `lora_a` is `[experts, rank, in]`, `lora_b` `[experts, out, rank]`, however W lies. Made from the layer in place.
    """

    PARTS: ClassVar = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    casts_parameters: ClassVar = True

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    rank: int
    alpha: float
    scaling: float
    dropout: float
    dropout_keys: Tensor | None
    layer_seed: Tensor

    @classmethod
    def adapt(cls, layer: ExpertLinear, name: str, rank: int, alpha: float, lora: LoRA) -> None:
        """Raises TuneError for kinds that PEFT has not for experts."""
        if lora.dora or lora.init != "default":
            kind = "dora=true" if lora.dora else f"init={lora.init}"
            raise TuneError(f"adapter.target_modules: {name} are experts, which {kind} has no form for; leave them out")
        layer.__class__ = cls
        assert isinstance(layer, LoRAExperts)
        layer.lora_a = nn.Parameter(layer.weight.new_empty(layer.num_experts, rank, layer.in_features))
        layer.lora_b = nn.Parameter(layer.weight.new_empty(layer.num_experts, layer.out_features, rank))
        layer.rank, layer.alpha, layer.scaling = rank, alpha, lora.scaling(rank, alpha)
        prepare_dropout(layer, name, lora.dropout)

    def start(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Where the parameters start, in full: A uniform as in `nn.Linear`, B zero."""
        bound = 1 / math.sqrt(self.in_features)
        return {
            "lora_a": torch.empty(self.lora_a.shape).uniform_(-bound, bound, generator=generator),
            "lora_b": torch.zeros(self.lora_b.shape),
        }

    def merged(self, weight: Tensor) -> Tensor:
        """`weight`, that of all experts, with their adapters in it, in its type: all processes must call it."""
        a, b = (full_tensor(each.detach()).to(weight.device, torch.float32) for each in (self.lora_a, self.lora_b))
        merged = torch.empty_like(weight)
        for into, base, its_a, its_b in zip(merged, weight, a, b, strict=True):  # all in fp32 would be large
            added = self.scaling * (its_b @ its_a)
            into.copy_(base.float() + (added.T if self.transposed else added))
        return merged

    def forward(self, rows: Tensor, plan: Dispatch) -> Tensor:
        a, b = (factor.to(rows.dtype).mT for factor in (self.lora_a, self.lora_b))
        low_rank = grouped_product(self._dropped(rows, plan), a, plan.ends) * self.scaling
        return super().forward(rows, plan) + grouped_product(low_rank, b, plan.ends)

    def _dropped(self, rows: Tensor, plan: Dispatch) -> Tensor:
        if not (self.dropout and self.training):
            return rows
        assert self.dropout_keys is not None, "set_dropout_keys must come before a forward in training"
        # The bits are those of the token and the expert, wherever the row of the two lies.
        keys = mix(self.dropout_keys.flatten()[plan.tokens] ^ (plan.experts.int() * THIRD))
        return dropout(rows, self.dropout, keys, self.layer_seed)


def joined(part: str, stack: Tensor) -> Tensor:
    """A or B of all experts in one matrix, as PEFT has it: `[experts * rank, in]` or `[out, rank * experts]`."""
    return stack.flatten(0, 1) if part == "lora_a" else stack.permute(1, 2, 0).flatten(1)


def parted(part: str, matrix: Tensor, num_experts: int) -> Tensor:
    """The `stack` of which `joined` made `matrix`."""
    if part == "lora_a":
        return matrix.unflatten(0, (num_experts, -1))
    return matrix.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
