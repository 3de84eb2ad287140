"""Compare two ways to share keys and values of an attention: one gather, as in `parallel.cp`, and a ring.

    torchrun --nproc-per-node 4 benchmarks/ring.py [--tokens 32768] [--query-heads 32]

The shape is an 8B Llama's in bf16: 8 heads of size 128 for keys and values. Each process has an equal part of the
tokens, and its queries attend to all tokens, without a mask, so that all processes have the same work. The ring sends
the current part on while queries attend to it, and merges results by their log-sum-exp. Forward only, on CPUs. Prints
the largest values over processes: seconds of the exchange alone and with attention, and the MB that it adds.
"""

import argparse
import time

import torch
import torch.distributed as dist
from sharded_memory import MB, peak

from tune import distributed
from tune.distributed import Peers

KEY_HEADS, SIZE = 8, 128
attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def by_gather(queries, own, peers):
    parts = peers.gathered(own).view(peers.size, *own.shape)
    if queries is not None:
        return attention(queries, *parts.movedim(0, 3).flatten(3, 4))[0]


def by_ring(queries, own, peers):
    total = scale = None
    for step in range(peers.size):
        coming, works = torch.empty_like(own), []
        if step < peers.size - 1:
            works = [dist.isend(own, (peers.rank + 1) % peers.size), dist.irecv(coming, (peers.rank - 1) % peers.size)]
        if queries is not None:
            found, of_part = attention(queries, *own)
            both = of_part if step == 0 else torch.logaddexp(scale, of_part)
            found = found * (of_part - both).exp()[..., None]  # in fp32
            total = found if step == 0 else total.mul_((scale - both).exp()[..., None]).add_(found)
            scale = both
        [work.wait() for work in works]
        own = coming
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--query-heads", type=int, default=32)
    options = parser.parse_args()
    world = distributed.init("cpu")
    peers = Peers.of(world.mesh["dp_shard"])
    torch.manual_seed(peers.rank)
    own = torch.randn(2, 1, KEY_HEADS, options.tokens // peers.size, SIZE, dtype=torch.bfloat16)
    # Query heads with the same keys are concatenated like additional tokens.
    queries = torch.randn(1, KEY_HEADS, own.shape[3] * options.query_heads // KEY_HEADS, SIZE, dtype=torch.bfloat16)
    results = []
    for way in (by_gather, by_ring):
        way(queries[..., :8, :], own[..., :8, :].contiguous(), peers)  # the first exchange connects
        found = {}
        for name, given in (("alone", None), ("with attention", queries)):
            world.barrier()
            begin = time.perf_counter()
            with peak(found, "memory"):
                result = way(given, own, peers)
            found[name] = time.perf_counter() - begin
        results.append(result)
        most = {name: max(each[name] for each in world.from_all_ranks(found)) for name in found}
        if world.is_main:
            print(way.__name__, ", ".join(f"{name} {figure:,.2f}" for name, figure in most.items()), sep=": ")
    if world.is_main:
        apart, sent = (results[0] - results[1]).norm() / results[1].norm(), own.nbytes * (peers.size - 1) / MB
        print(f"each of {peers.size} sends {sent:,.0f} MB; the results differ by {apart:.1e}")
    world.finish()


if __name__ == "__main__":
    main()
