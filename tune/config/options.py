"""Types and ranges of settings. A setting that is not listed has the type of its default.

Arguments of components are checked by their annotations; torch's components, which give no range, are listed here.
"""

from typing import Annotated, Any, Literal

from tune.types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, UnitInterval

OPTIONS: dict[str, Any] = {
    "output_dir": str | None,
    "max_seq_len": PositiveInt,
    "seed": NonNegativeInt,
    "epochs": PositiveInt,
    "max_steps": PositiveInt | None,
    "global_batch_size": PositiveInt,
    "micro_batch_size": PositiveInt,
    "validate_every": PositiveInt | None,
    "include_path": str | None,
    "limit": PositiveFloat | None,
    "num_fewshot": NonNegativeInt | None,
    "batch_size": PositiveInt | None,
    "max_length": PositiveInt | None,
    "score": str | list | dict,
    "chat_template": str | None,
    "out": str | None,
    "evaluate.prompts": str | None,
    "evaluate.max_new_tokens": PositiveInt,
    "evaluate.temperature": NonNegativeFloat,
    "max_prompt_len": PositiveInt,
    "prompts_per_step": PositiveInt,
    "updates": PositiveInt,
    "group_size": Annotated[int, Range("an integer from 2: the completions of a prompt are compared", minimum=2)],
    "max_turns": PositiveInt,
    "baseline": Literal["mean", "leave_one_out"],
    "dynamic_sampling": NonNegativeInt,
    "sampling.temperature": PositiveFloat,
    "kl": NonNegativeFloat,
    "samples_per_prompt": PositiveInt,
    "value_weight": NonNegativeFloat,
    "value_clip": PositiveFloat,
    "gae_lambda": UnitInterval,
    "reward": str | list | dict,
    "environment": str | None,
    "optimizer.lr": NonNegativeFloat,
    "optimizer.betas": list[Fraction],
    "optimizer.eps": NonNegativeFloat | list,
    "optimizer.weight_decay": NonNegativeFloat,
    "optimizer.momentum": NonNegativeFloat,
    "parameter_groups.lr_ratios": dict[str, PositiveFloat],
    "adapter": dict | None,
    "reference": str,
    "quantization.weights": Literal["nf4"] | None,
    "quantization.qat": Literal["int8", "int4", "fp8"] | None,
    "quantization.float8": Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None,
    "teacher.dtype": Literal["bf16", "fp32"],
    "teacher.quantization": Literal["nf4"] | None,
    "teacher.top_k": PositiveInt | None,
    "on_policy.share": UnitInterval,
    "on_policy.max_new_tokens": PositiveInt,
    "max_grad_norm": PositiveFloat | None,
    "device": Literal["auto", "cpu", "cuda", "mps"],
    "dtype": Literal["bf16", "fp32"],
    "master_dtype": Literal["bf16", "fp32"],
    "parallel.dp_replicate": PositiveInt,
    "parallel.dp_shard": PositiveInt | Literal["auto"],
    "parallel.cp": PositiveInt,
    "parallel.tp": PositiveInt,
    "parallel.ep": PositiveInt,
    "parallel.pp": PositiveInt,
    "parallel.pp_schedule": Literal["gpipe", "1f1b"],
    "parallel.timeout": PositiveFloat,
    "memory.activation_checkpointing": Literal["none", "selective", "full"],
    "memory.loss_chunk_tokens": PositiveInt | None,
    "export.dtype": Literal["bf16", "fp32"] | None,
    "logger.console_every": PositiveInt,
    "logger.wandb.project": str | None,
    "logger.wandb.name": str | None,
    "profiler.start": PositiveInt | None,
    "profiler.steps": PositiveInt,
}

OPTIONS["evaluate.every"] = OPTIONS["validate_every"]
OPTIONS |= {f"evaluate.{name}": OPTIONS[name] for name in ("include_path", "limit", "num_fewshot")}

# A setting that is null by default, and the component whose arguments it has where it names none.
OFF_BY_DEFAULT = {"adapter": "tune.peft.adapter"}
