"""Run in each process: processes with sharded logits choose the same ids as one process with all logits."""

import os

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

from tune import distributed
from tune.generation import choose

SETTINGS = [
    *({"temperature": 0}, {}, {"temperature": 0.5}, {"top_k": 1}, {"top_k": 7}, {"top_k": 250}, {"top_k": 1000}),
    *({"top_p": 0.8}, {"top_p": 1e-9}, {"min_p": 0.05}, {"min_p": 1.0}),
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
]


def main() -> None:
    size = int(os.environ["WORLD_SIZE"])
    mesh = distributed.init("cpu", tp=size).mesh["tp"]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 100 * size, generator=generator) * 3
    logits[:100, : 100 * (size - 1)] = -torch.inf  # all possible ids are in the shard of the last process
    logits[100:200, 100:] = -torch.inf
    logits[0, ::2] = logits[0, 1::2] = logits[0].amax()  # equally likely
    shares = DTensor.from_local(logits.chunk(size, dim=1)[mesh.get_local_rank()], mesh, [Shard(1)])
    draws = torch.rand(500, generator=generator, dtype=torch.float64)
    draws[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for settings in SETTINGS:
        ids, log_probs = choose(shares, draws, **settings)
        expected, its_log_probs = choose(logits, draws, **settings)
        same = ids == expected
        assert (~same).sum() <= 1, settings  # a draw may lie between sums that sharding rounds differently
        assert_close(log_probs[same], its_log_probs[same], atol=1e-5, rtol=1e-6)


if __name__ == "__main__":
    main()
