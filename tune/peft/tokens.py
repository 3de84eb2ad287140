"""Train the rows of a few tokens in an embedding and output head that are otherwise frozen."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.checkpointers import DiskTensor, plain_tensors
from tune.distributed import full_tensor
from tune.models import Names
from tune.parts import part_of

CHUNK = 16_384  # rows compared at a time
ALIKE, SMALL = 0.999, 0.1  # cosine similarity; share of the median norm


class TokenRows(nn.Module):
    """Mixin of both kinds: `rows` `[len(tokens), dim]` replace the rows of `tokens` in the weight."""

    PARTS: ClassVar = {"rows": "token_adapter.trainable_tokens_delta"}
    added: ClassVar = ("rows", "token_ids")  # tensors added to the module
    casts_parameters: ClassVar = True
    is_off = False  # compute without the trained rows

    weight: Tensor
    rows: nn.Parameter
    tokens: list[int]
    token_ids: Tensor

    @classmethod
    def adapt(cls, module: Any, tokens: list[int], tied_to: "TokenRows | None" = None) -> "TokenRows":
        module.__class__, module.tokens = cls, tokens
        module.register_buffer("token_ids", torch.tensor(tokens, device="cpu"), persistent=False)
        rows = module.weight.new_empty(len(tokens), module.weight.shape[1])
        module.rows = nn.Parameter(rows) if tied_to is None else tied_to.rows
        return module

    def remove(self) -> None:
        """Become the original module again, with its current weight."""
        for name in (*self.added, "tokens"):
            delattr(self, name)
        self.__class__ = type(self).__bases__[-1]

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial values of the parameters, in full: the rows of the weight."""
        return {"rows": full_tensor(self.weight)[self.tokens]}

    def merged(self, weight: Tensor) -> Tensor:
        """`weight`, the full base weight, with the trained rows. All processes must call this."""
        rows = full_tensor(self.rows.detach()).to(weight.device, torch.float32)
        return weight.float().index_copy(0, torch.tensor(self.tokens, device=weight.device), rows)

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """For a head: inputs and weight whose product is the logits, for a loss that computes them in chunks."""
        if self.is_off:
            return hidden, self.weight
        return hidden, self.weight.index_copy(0, self.token_ids, self.rows.to(self.weight.dtype))


class TokenEmbedding(TokenRows, nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        if self.is_off:
            return super().forward(input)
        matches = input[..., None] == self.token_ids
        trained = F.embedding(matches.int().argmax(dim=-1), self.rows.to(self.weight.dtype))
        return torch.where(matches.any(dim=-1, keepdim=True), trained, super().forward(input))


class TokenHead(TokenRows, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        _, weight = self.operands(input)
        return F.linear(input, weight, self.bias)


def untrained_tokens(model: nn.Module, path: str | Path, tokens: Collection[int]) -> list[int]:
    """The `tokens` whose row in the checkpoint's embedding or head seems untrained, and is frozen in the adapted
    `model`."""
    kinds = (nn.Embedding, TokenEmbedding, TokenHead)  # the other kinds train all rows
    frozen = {
        name: set(tokens).difference(getattr(module, "tokens", ()))
        for name, module in model.named_modules()
        if part_of(model, name) == "language"
        and (type(module) in kinds or (name == "head" and type(module) is nn.Linear))
        and not module.get_parameter("weight").requires_grad
    }
    if not any(frozen.values()):
        return []
    tensors = plain_tensors(Path(path))
    in_checkpoint = Names.of(model).in_checkpoint(tensors)
    found: set[int] = set()
    for name, rows in frozen.items():
        on_disk = in_checkpoint.get(f"{name}.weight")
        if rows and isinstance(on_disk, str) and on_disk in tensors:
            found |= _untrained_rows(tensors[on_disk], sorted(rows))
    return sorted(found)


def _untrained_rows(weight: DiskTensor, tokens: list[int]) -> set[int]:
    """Rows near zero (reserved tokens of untied models), rows like another row (tied models), and rows like the mean of
    all rows (`tune add-tokens`)."""
    rows = torch.cat([weight.read((slice(token, token + 1),)) for token in tokens]).float()
    norms, total, likest = [], torch.zeros(rows.shape[1]), torch.full((len(tokens),), -1.0)
    for start in range(0, weight.shape[0], CHUNK):
        chunk = weight.read((slice(start, start + CHUNK),)).float()
        alike = F.normalize(chunk) @ F.normalize(rows).T
        for column, token in enumerate(tokens):
            alike[max(0, token - start) : max(0, token + 1 - start), column] = -1
        likest = torch.maximum(likest, alike.amax(dim=0))
        norms.append(chunk.norm(dim=1))
        total += chunk.sum(dim=0)
    likest = torch.maximum(likest, F.cosine_similarity(rows, total[None]))
    small = rows.norm(dim=1) < SMALL * torch.cat(norms).median()
    return {token for token, untrained in zip(tokens, (small | (likest > ALIKE)).tolist(), strict=True) if untrained}
