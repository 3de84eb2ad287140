"""Process group and mesh, sharding with FSDP2, activation memory, signals: one path for 1 to N processes."""

from tune.distributed.interrupt import Interrupt
from tune.distributed.parallelize import (
    DTYPES,
    clip_grad_norm_,
    gathered,
    parallelize,
    reshard,
    set_gradient_sync,
    stored_dtype,
)
from tune.distributed.shards import full_tensor, local_shard
from tune.distributed.tensor_parallel import summed
from tune.distributed.world import World, init

__all__ = [
    "DTYPES",
    "Interrupt",
    "World",
    "clip_grad_norm_",
    "full_tensor",
    "gathered",
    "init",
    "local_shard",
    "parallelize",
    "reshard",
    "set_gradient_sync",
    "stored_dtype",
    "summed",
]
