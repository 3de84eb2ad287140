"""Training the rows of a few tokens, of an embedding and an output head that are otherwise frozen."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.distributed import full_tensor


class TokenRows(nn.Module):
    """The mixin of both: `rows` `[len(tokens), dim]` stand for those of the `tokens` in the weight."""

    PARTS: ClassVar = {"rows": "token_adapter.trainable_tokens_delta"}
    casts_parameters: ClassVar = True

    rows: nn.Parameter
    tokens: list[int]
    token_ids: Tensor

    @classmethod
    def adapt(cls, module: nn.Module, tokens: list[int], tied_to: "TokenRows | None" = None) -> "TokenRows":
        module.__class__ = cls
        assert isinstance(module, TokenRows)
        module.tokens = tokens
        module.register_buffer("token_ids", torch.tensor(tokens, device="cpu"), persistent=False)
        weight = module.base_weight()
        rows = weight.new_empty(len(tokens), weight.shape[1])
        module.rows = nn.Parameter(rows) if tied_to is None else tied_to.rows
        return module

    def base_weight(self) -> Tensor:
        assert isinstance(self.weight, Tensor)
        return self.weight

    def start(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Where the parameters start, in full: at what the rows are."""
        return {"rows": full_tensor(self.base_weight())[self.tokens]}

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and weight whose product is the logits, for a loss that takes it by parts: of a head."""
        weight = self.base_weight()
        return hidden, weight.index_copy(0, self.token_ids, self.rows.to(weight.dtype))


class TokenEmbedding(TokenRows, nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        matches = input[..., None] == self.token_ids
        trained = F.embedding(matches.int().argmax(dim=-1), self.rows.to(self.weight.dtype))
        return torch.where(matches.any(dim=-1, keepdim=True), trained, super().forward(input))


class TokenHead(TokenRows, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        _, weight = self.operands(input)
        return F.linear(input, weight, self.bias)
