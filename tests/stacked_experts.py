"""A made-up model whose experts are separate tensors on disk and one stacked parameter in memory.

Run as a script in several processes, it loads the folder `sys.argv[1]`, prints an output, and exports to `sys.argv[2]`.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from tune import checkpointers, distributed
from tune.models.names import Names

EXPERTS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(EXPERTS, 4, 4))
        self.norm = nn.RMSNorm(4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.einsum("eij,...j->...i", self.experts, self.norm(hidden))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.names = Names({})
        for layer in range(2):
            experts = [f"layers.{layer}.experts.{expert}.weight" for expert in range(EXPERTS)]
            self.names.on_disk[f"blocks.{layer}.experts"] = experts
            self.names.on_disk[f"blocks.{layer}.norm.weight"] = f"layers.{layer}.norm.weight"

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class NoTokenizer:
    def save(self, folder: Path) -> None:
        pass


if __name__ == "__main__":
    world = distributed.init("cpu")
    with torch.device("meta"):
        model = Stacked()
    weights = checkpointers.Pretrained(sys.argv[1], model)
    distributed.parallelize(model, world, dtype="fp32")
    weights.load(model)
    checkpointers.export(model, NoTokenizer(), Path(sys.argv[2]), world, source=sys.argv[1])
    print(model(torch.arange(4.0)).sum().item())
