"""Process group and mesh, sharding with FSDP2, activation memory and signals: one path for 1 to N processes."""

from tune.distributed.activations import wrap_forward
from tune.distributed.context_parallel import own_part, split
from tune.distributed.determinism import cumsum, use_deterministic_kernels
from tune.distributed.exchanges import Peers, summed
from tune.distributed.expert_parallel import share_experts, shared_experts
from tune.distributed.inference import LARGE, PackedWeights, inference, without_fsdp_hooks
from tune.distributed.interrupt import Interrupt
from tune.distributed.loss_scale import LossScale
from tune.distributed.pace import PACE
from tune.distributed.parallelize import (
    DTYPES,
    Dtype,
    Parallelism,
    StoredDtype,
    allocate,
    as_dtype,
    cast_by_fsdp,
    clip_grad_norm_,
    loss_scales,
    parallelize,
    repeated_blocks,
    require_layout,
    reshard,
    set_gradient_sync,
    stored_dtype,
    units_of,
)
from tune.distributed.pipeline import Pipeline, Stage, from_its_stage, split_blocks, uncut
from tune.distributed.plans import check_plan
from tune.distributed.ray_train import is_ray_worker, report
from tune.distributed.restarts import end_with_parent, launcher_store
from tune.distributed.shards import full_tensor, layout_of, local_shard, norm_of_squares, sum_of_squares
from tune.distributed.tensor_parallel import share, undivided
from tune.distributed.traffic import bytes_sent
from tune.distributed.world import Unconnected, World, current_world, init, join

# Other names are internal to `tune`.
__all__ = [
    "DTYPES",
    "PACE",
    "Interrupt",
    "LossScale",
    "PackedWeights",
    "Pipeline",
    "World",
    "bytes_sent",
    "check_plan",
    "clip_grad_norm_",
    "current_world",
    "from_its_stage",
    "full_tensor",
    "inference",
    "init",
    "join",
    "layout_of",
    "local_shard",
    "norm_of_squares",
    "parallelize",
    "repeated_blocks",
    "require_layout",
    "reshard",
    "set_gradient_sync",
    "share",
    "stored_dtype",
    "sum_of_squares",
    "summed",
    "uncut",
    "undivided",
    "units_of",
    "use_deterministic_kernels",
    "wrap_forward",
]
