"""Types and ranges of the settings that recipes share, by their place in the YAML.

What a component's argument may be is said by its own annotations; here stand those of torch that lack a range.
"""

from typing import Literal

from tune.types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Group:
    """Settings under one key."""


class Optimizer(Group):
    lr: NonNegativeFloat
    betas: list[Fraction]
    eps: NonNegativeFloat | list
    weight_decay: NonNegativeFloat
    momentum: NonNegativeFloat


class Parallel(Group):
    dp_replicate: PositiveInt
    dp_shard: PositiveInt | Literal["auto"]
    reduce_every_micro_batch: bool
    timeout: PositiveFloat


class Memory(Group):
    activation_checkpointing: Literal["none", "selective", "full"]
    activation_offload: bool
    cpu_offload: bool
    loss_chunk_tokens: PositiveInt | None


class ParameterGroups(Group):
    decay_vectors: bool
    lr_ratios: dict[str, PositiveFloat]


class Quantization(Group):
    weights: Literal["nf4"] | None
    double: bool


class Export(Group):
    dtype: Literal["bf16", "fp32"] | None
    merge: bool


class WandbSettings(Group):
    project: str | None
    name: str | None


class Logger(Group):
    console_every: PositiveInt
    tensorboard: bool
    wandb: WandbSettings


class Profiler(Group):
    start: PositiveInt | None
    steps: PositiveInt


class Options(Group):
    output_dir: str | None
    resume: str
    from_scratch: bool
    max_seq_len: PositiveInt
    packed: bool
    seed: NonNegativeInt
    epochs: PositiveInt
    max_steps: PositiveInt | None
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    validate_every: PositiveInt | None
    validate_first: bool
    optimizer: Optimizer
    optimizer_in_backward: bool
    parameter_groups: ParameterGroups
    quantization: Quantization
    max_grad_norm: PositiveFloat | None
    device: Literal["auto", "cpu", "cuda", "mps"]
    dtype: Literal["bf16", "fp32"]
    master_dtype: Literal["bf16", "fp32"]
    parallel: Parallel
    memory: Memory
    compile: bool
    export: Export
    logger: Logger
    profiler: Profiler
