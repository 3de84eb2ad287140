"""Your own training loop on several processes: torch's process group and `fully_shard`, an adapted net, one folder.

Run as a script, it trains, exports the adapter to `sys.argv[1]`, and prints the losses.
"""

import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from tune.errors import TuneError
from tune.peft import LoRA, adapter_state_dict, add_adapters, export_adapter, merge_in_place

INPUTS = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(8) % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(32, 3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def train(model: nn.Module, rows: slice, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(INPUTS[rows]), TARGETS[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    model = Net()
    add_adapters(model, LoRA(rank=4, modules_to_save=["head"]))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    share = len(INPUTS) // dist.get_world_size()
    losses = torch.tensor(train(model, slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)))
    dist.all_reduce(losses)
    for refused in (lambda: merge_in_place(model), lambda: add_adapters(model, LoRA(target_modules=["head"]))):
        try:
            refused()
        except TuneError as error:
            assert "sharded" in str(error)
        else:
            raise AssertionError("a sharded model is not refused")
    state = adapter_state_dict(model)  # whole, on every process
    sums = torch.stack([tensor.double().sum() for tensor in state.values()])
    theirs = sums.clone()
    dist.broadcast(theirs, src=0)
    assert torch.equal(sums, theirs)
    export_adapter(model, sys.argv[1])
    if dist.get_rank() == 0:
        print(json.dumps((losses / dist.get_world_size()).tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
