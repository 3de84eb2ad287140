"""Types and ranges of settings. A setting that is not listed has the type of its default.

Arguments of components are checked by their annotations; torch's components, which give no range, are listed here.
"""

from typing import Annotated, Any, Literal

from tune.types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, UnitInterval

TYPES: list[tuple[Any, str]] = [
    (
        PositiveInt,
        "max_seq_len epochs global_batch_size micro_batch_size max_prompt_len prompts_per_step updates max_turns "
        "samples_per_prompt evaluate.max_new_tokens on_policy.max_new_tokens parallel.dp_replicate parallel.cp "
        "parallel.tp parallel.ep parallel.pp logger.console_every profiler.steps",
    ),
    (
        PositiveInt | None,
        "max_steps validate_every evaluate.every batch_size max_length teacher.top_k parallel.pp_virtual "
        "memory.loss_chunk_tokens profiler.start",
    ),
    (NonNegativeInt, "seed dynamic_sampling"),
    (NonNegativeInt | None, "num_fewshot evaluate.num_fewshot"),
    (Annotated[int, Range("an integer from 2: completions of a prompt are compared", lambda x: x > 1)], "group_size"),
    (PositiveFloat, "sampling.temperature value_clip parallel.timeout"),
    (PositiveFloat | None, "limit evaluate.limit max_grad_norm"),
    (NonNegativeFloat, "evaluate.temperature kl value_weight optimizer.lr optimizer.weight_decay optimizer.momentum"),
    (UnitInterval, "gae_lambda on_policy.share"),
    (
        str | None,
        "output_dir include_path evaluate.include_path chat_template out evaluate.prompts environment "
        "logger.wandb.project logger.wandb.name",
    ),
    (str, "reference model.path teacher.path"),
    (list[str], "tasks evaluate.tasks adapters"),
    (str | list | dict, "score"),
    (str | list | dict | None, "reward"),
    (dict | None, "adapter"),
    (bool | list[str], "compile"),
    (dict[str, str] | None, "parallel.plan"),
    (dict[str, PositiveFloat], "parameter_groups.lr_ratios"),
    (list[Fraction], "optimizer.betas"),
    (NonNegativeFloat | list, "optimizer.eps"),
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
