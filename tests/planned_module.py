"""A custom module with attention and its tensor-parallel plan."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

PLAN = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "attention.query_norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Attention(nn.Module):
    def __init__(self, width: int, size: int):
        super().__init__()
        self.size = size
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.query_norm = nn.LayerNorm(size)

    def forward(self, hidden, mask):
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(self.query_norm(query), key, value, mask[:, None])
        return self.output(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, size: int):
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.LayerNorm(width) for name in ("attention", "mlp")})
        self.attention = Attention(width, size)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden, mask):
        hidden = hidden + self.attention(self.norms["attention"](hidden), mask)
        return hidden + self.down(F.gelu(self.up(self.norms["mlp"](hidden))))


class Mine(nn.Module):
    def __init__(self, vocab_size: int = 300, width: int = 32, depth: int = 2, heads: int = 4):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab_size, hidden_size=width, num_attention_heads=heads)
        self.embedding, self.places = nn.Embedding(vocab_size, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, width // heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, batch, head=None):
        hidden = self.embedding(batch.tokens) + self.places(batch.positions)
        ids, order = batch.documents.ids, torch.arange(hidden.shape[1])
        mask = (ids[:, :, None] == ids[:, None]) & (order[:, None] >= order)
        for block in self.blocks:
            hidden = block(hidden, mask)
        hidden = self.norm(hidden)
        return self.head(hidden) if head is None else head(hidden, self.head.weight, batch)


def build(path: str, heads: int = 4) -> Mine:
    return Mine(heads=heads)
