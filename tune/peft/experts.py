"""LoRA on the experts of a mixture, one adapter for each of them."""

import torch
from torch import Tensor, nn

from tune.models.grouped_product import grouped_product
from tune.models.moe import Dispatch, ExpertLinear
from tune.peft.dropout import THIRD, dropout, mix
from tune.peft.lora import LoRA, LowRank


class LoRAExperts(LowRank, ExpertLinear):
    """A linear layer for each expert, whose weight W is used as W + scaling * B @ A, with a B and an A of its own.

    `lora_a` is `[experts, rank, in]`, `lora_b` `[experts, out, rank]`, also where W is transposed.
    """

    def add_parameters(self, lora: LoRA) -> None:
        self.lora_a = nn.Parameter(self.weight.new_empty(self.num_experts, self.rank, self.in_features))
        self.lora_b = nn.Parameter(self.weight.new_empty(self.num_experts, self.out_features, self.rank))

    def merged(self, weight: Tensor) -> Tensor:
        """`weight`, that of all experts, with their adapters merged in, in its type: all processes must call it."""
        a, b = self.full_factors(weight.device)
        merged = torch.empty_like(weight)
        for into, base, its_a, its_b in zip(merged, weight, a, b, strict=True):  # all in fp32 would be large
            added = self.scaling * (its_b @ its_a)
            into.copy_(base.float() + (added.T if self.transposed else added))
        return merged

    def forward(self, rows: Tensor, plan: Dispatch) -> Tensor:
        if self.is_off:
            return super().forward(rows, plan)
        a, b = (factor.to(rows.dtype).mT for factor in (self.lora_a, self.lora_b))
        low_rank = grouped_product(self._dropped(rows, plan), a, plan.ends) * self.scaling
        return super().forward(rows, plan) + grouped_product(low_rank, b, plan.ends)

    def _dropped(self, rows: Tensor, plan: Dispatch) -> Tensor:
        if not (self.dropout and self.training):
            return rows
        assert self.dropout_keys is not None, "set_dropout_keys must come before a forward in training"
        # The random bits depend on the token and the expert, not on where their row is.
        keys = plan.of_tokens(self.dropout_keys.flatten()) ^ ((plan.first + plan.experts.int()) * THIRD)
        keys = mix(keys)
        return dropout(rows, self.dropout, keys, self.layer_seed, self.first_input)


def joined(part: str, stack: Tensor) -> Tensor:
    """A or B of all experts in one matrix, as in PEFT's files: `[experts * rank, in]` or `[out, rank * experts]`."""
    return stack.flatten(0, 1) if part == "lora_a" else stack.permute(1, 2, 0).flatten(1)


def parted(part: str, matrix: Tensor, num_experts: int) -> Tensor:
    """The inverse of `joined`."""
    if part == "lora_a":
        return matrix.unflatten(0, (num_experts, -1))
    return matrix.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
