"""Types and ranges of settings that neither a default nor a signature gives: a default of null has no type, a number no
range, and torch's components annotate neither.

A setting that is not listed has the type of its default, and an argument of a component the type of its annotation.
"""

from typing import Annotated, Any, Literal

from tune.types import (
    Epochs,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    UnitInterval,
)

# Ranges of what torch's optimizers take without a word. An `eps` of 0 divides by zero where a gradient is zero.
Rate = Annotated[float, Range("a number from 0 to 100", lambda x: 0 <= x <= 100)]
Ratio = Annotated[float, Range("a number above 0 and up to a million", lambda x: 0 < x <= 1e6)]
Epsilon = Annotated[float, Range("a number from 1e-30 to 1", lambda x: 1e-30 <= x <= 1)]
Decays = Annotated[
    list[Fraction],
    Range("a list of two or more numbers from 0 to below 1, such as [0.9, 0.95]", lambda x: len(x) > 1),
]
# The dotted path of a function or a class, which can be imported. `_component_` is one, too.
DottedPath = Annotated[str | None, "dotted path"]

TYPES: list[tuple[Any, str]] = [
    (
        PositiveInt,
        "max_seq_len global_batch_size micro_batch_size max_prompt_len prompts_per_step updates max_turns "
        "samples_per_prompt on_policy.max_new_tokens parallel.dp_replicate parallel.cp "
        "parallel.tp parallel.ep parallel.pp logger.console_every profiler.steps",
    ),
    (
        PositiveInt | None,
        "max_steps validate_every batch_size max_length teacher.top_k parallel.pp_virtual "
        "memory.loss_chunk_tokens profiler.start",
    ),
    (Epochs, "epochs"),
    (NonNegativeInt, "seed dynamic_sampling"),
    (NonNegativeInt | None, "num_fewshot"),
    (Annotated[int, Range("an integer from 2: completions of a prompt are compared", lambda x: x > 1)], "group_size"),
    (PositiveFloat, "sampling.temperature value_clip parallel.timeout"),
    (PositiveFloat | None, "limit max_grad_norm"),
    (NonNegativeFloat, "kl value_weight"),
    (Rate, "optimizer.lr optimizer.weight_decay"),
    (Fraction, "optimizer.momentum"),
    (UnitInterval, "gae_lambda on_policy.share"),
    (
        str | None,
        "output_dir include_path chat_template out logger.wandb.project logger.wandb.name",
    ),
    (DottedPath, "environment"),
    (str, "reference model.path teacher.path"),
    (list[str], "tasks adapters"),
    (str | list | dict, "score"),
    (str | list | dict | None, "reward"),
    (dict | None, "adapter"),
    (bool | list[str], "compile"),
    (dict[str, str] | None, "parallel.plan"),
    (dict[str, Ratio], "parameter_groups.lr_ratios"),
    (Decays, "optimizer.betas"),
    (Epsilon | list[Epsilon | None], "optimizer.eps"),
    (PositiveInt | Literal["auto"], "parallel.dp_shard"),
    (Literal[0, 1, 2, 3] | None, "parallel.zero_stage"),
    (Literal["gpipe", "1f1b", "interleaved", "zero_bubble"], "parallel.pp_schedule"),
    (Literal["auto", "cpu", "cuda", "mps"], "device"),
    (Literal["bf16", "fp32"], "master_dtype teacher.dtype"),
    (Literal["bf16", "fp16", "fp32"], "dtype"),
    (Literal["bf16", "fp32"] | None, "export.dtype"),
    (Literal["nf4"] | None, "quantization.weights teacher.quantization"),
    (Literal["int8", "int4", "fp8", "mxfp4"] | None, "quantization.qat"),
    (Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None, "quantization.float8"),
    (Literal["none", "selective", "full"], "memory.activation_checkpointing"),
    (Literal["mean", "leave_one_out"], "baseline"),
]
OPTIONS: dict[str, Any] = {key: kind for kind, keys in TYPES for key in keys.split()}

# A setting that is null by default, and the component whose arguments it has where it names none.
OFF_BY_DEFAULT = {"adapter": "tune.peft.adapter"}
