"""transformers.TrainingArguments, which LLaMA-Factory and TRL also accept."""

from collections.abc import Iterator
from typing import Any

from tune.migrate.converters import KEEP, Choose, Differs, To
from tune.migrate.leaves import KeyNames, Leaves, exceeds
from tune.migrate.migration import Convert, Migration
from tune.migrate.peers import common


def mixed_precision(run: Migration, key: str, value: str) -> None:
    """Set the dtype of `accelerate launch`, which the Trainer uses if both bf16 and fp16 are off."""
    flags = run.usual | run.theirs
    if flags.get("bf16") or flags.get("fp16"):
        run.same("the Trainer's bf16 and fp16 decide", key)
    else:
        run.set("parts.bf16", value == "bf16", key)
        run.set("parts.fp16", value == "fp16", key)


def launch_file(run: Migration, key: str, value: str) -> None:
    """Report a config file of `accelerate launch` that could not be read."""
    run.missing("no such file here: pass its num_processes as --world-size, unless it is 1", key)


of_tracker = Choose(
    None,
    {
        "wandb": {"parts.trackers.WeightsAndBiases": "huggingface"},
        "tensorboard": {"parts.trackers.TensorBoard": True},
        "mlflow": {"parts.trackers.MLflow": "huggingface"},
        "trackio": {"parts.trackers.Trackio": "huggingface"},
        ("none", "all"): KEEP,
        "*": (KEEP, "tune supports wandb, tensorboard, mlflow and trackio"),
    },
)


def report_to(run: Migration, key: str, value: Any) -> None:
    """Set the trackers; each has the project or experiment that transformers uses if no variable names one."""
    for name in value if isinstance(value, list) else [value]:
        of_tracker(run, key, name)


KEYS: dict[KeyNames, Convert] = {
    "output_dir": To("output_dir"),
    "overwrite_output_dir": Differs(
        "tune continues a run that it finds in output_dir; use a new folder to start over", unless=(False,)
    ),
    ("per_device_train_batch_size", "per_gpu_train_batch_size"): To("parts.micro_batch_size"),
    "gradient_accumulation_steps": To("parts.accumulation"),
    "learning_rate": To("optimizer.lr"),
    "weight_decay": To("optimizer.weight_decay"),
    "adam_beta1": To("parts.beta1"),
    "adam_beta2": To("parts.beta2"),
    "adam_epsilon": To("optimizer.eps"),
    "optim": Choose("optimizer._component_", common.OPTIMIZERS),
    "max_grad_norm": To("max_grad_norm", value=common.none_if_zero),
    "num_train_epochs": To("epochs"),
    "max_steps": To("max_steps", skip=(-1,)),
    "lr_scheduler_type": Choose("schedule._component_", common.SCHEDULERS),
    "lr_scheduler_kwargs.min_lr": To("parts.min_lr"),
    "lr_scheduler_kwargs.min_lr_rate": To("parts.min_ratio"),
    "warmup_steps": To("parts.warmup_steps"),
    "warmup_ratio": To("parts.warmup_ratio"),
    "bf16": To("parts.bf16"),
    "fp16": To("parts.fp16"),
    "seed": To("seed"),
    ("gradient_checkpointing", "activation_checkpointing"): common.activation_checkpointing,
    "torch_compile": To("compute.compile"),
    "eval_steps": To("evaluate.every"),
    "eval_on_start": To("evaluate.first"),
    "save_steps": To("checkpointer.every"),
    "save_strategy": common.save_strategy,
    "save_total_limit": To("checkpointer.keep"),
    "load_best_model_at_end": common.keep_best,
    ("early_stopping_patience", "early_stopping_steps"): To("checkpointer.patience"),
    "logging_steps": To("parts.console_every"),
    "report_to": report_to,
    "run_name": To("parts.run_name"),
    (
        "deepspeed",
        "fsdp",
        "fsdp_config.fsdp_sharding_strategy",
        "fsdp_config.sharding_strategy",
        "deepspeed.zero_optimization.stage",
        "accelerate.*fsdp_sharding_strategy",
        "accelerate.*zero_stage",
        "accelerate.*deepspeed_config_file",
    ): common.layout,
    ("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", "accelerate.*fsdp_offload_params"): To(
        "compute.cpu_offload"
    ),
    ("deepspeed.zero_optimization.offload_*.device", "accelerate.*offload_*_device"): Choose(
        "compute.cpu_offload", {"none": False, "*": True}
    ),
    (
        "fsdp_config.fsdp_activation_checkpointing",
        "fsdp_config.activation_checkpointing",
        "accelerate.*fsdp_activation_checkpointing",
    ): common.on_off_checkpointing,
    ("use_cpu", "no_cuda", "accelerate.use_cpu"): Choose("device", {True: "cpu", False: KEEP}),
    "neftune_noise_alpha": common.embedding_noise,
    "accelerate.config_file": launch_file,
    "accelerate.mixed_precision": mixed_precision,
    "accelerate.*dynamo_backend": Choose("compute.compile", {"no": False, "*": True}),
    "accelerate.parallelism_config*": Differs("see parallel.dp_replicate, .dp_shard and .tp"),
}

# fmt: off
ALWAYS: dict[KeyNames, str] = {
    "accelerate.num_processes": "the devices of global_batch_size, unless --world-size is given",
    "accelerate.distributed_type": "parallel.dp_shard=auto shards the model over all devices (FSDP2)",
    "accelerate.*": "tune run has launcher options of its own: docs/cli.md",
    ("do_train", "do_eval"): "tune run trains, and validates if there is validation data",
    "average_tokens_across_devices": "the loss is divided by the supervised tokens of the global batch",
    ("fsdp_config*", "deepspeed.*", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
        "parallel.dp_shard=auto shards each block (FSDP2)",
    ("ddp_timeout", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
     "ddp_backend", "local_rank"):
        "not needed with FSDP2",
    ("gradient_checkpointing_kwargs*", "activation_checkpointing_kwargs*"):
        "activation checkpointing is always non-reentrant",
    ("dataloader_*", "per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_batch_size",
     "eval_accumulation_steps", "group_by_length", "train_sampling_strategy", "length_column_name", "eval_delay"):
        "batches are prefetched; validation batches have micro_batch_size rows",
    ("remove_unused_columns", "label_names", "prediction_loss_only", "disable_tqdm", "log_level*", "log_on_each_node",
     "skip_memory_metrics", "include_num_input_tokens_seen", "include_tokens_per_second", "logging_first_step",
     "logging_dir", "logging_nan_inf_filter"):
        "metrics.jsonl records every step",
    ("logging_strategy", "eval_strategy", "evaluation_strategy", "do_predict", "batch_eval_metrics",
     "eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics"):
        "validation runs at the end and every evaluate.every steps",
    ("tf32", "use_liger_kernel", "liger_kernel_config*", "use_cache", "torch_empty_cache_steps", "full_determinism",
     "data_seed", "auto_find_batch_size", "save_safetensors", "save_on_each_node", "use_legacy_prediction_loop",
     "optim_target_modules", "accelerator_config*", "ignore_data_skip", "restore_callback_states_from_checkpoint",
     "enable_jit_checkpoint", "bf16_full_eval", "fp16_full_eval"):
        "decided by the library and the hardware",
    ("torch_compile_backend", "torch_compile_mode"): "compute.compile=true uses torch's defaults",
    ("save_only_model", "hub_strategy", "hub_always_push", "hub_private_repo", "hub_revision"):
        "model files and checkpoints are separate",
    ("greater_is_better", "metric_for_best_model"): "the best checkpoint has the smallest validation_loss",
    "resume_from_checkpoint": "resume=auto continues the run in output_dir; other libraries' checkpoints are not read",
}

LACKING: dict[KeyNames, str] = {
    "label_smoothing_factor": "no label smoothing; docs/changes.md has a loss that smooths labels",
    "optim_args": "set each as optimizer.NAME",
    "lr_scheduler_kwargs*": "set each as schedule.NAME",
    ("push_to_hub", "hub_model_id", "hub_token"): "a run uploads nothing; use tune push",
    "parallelism_config*": "see parallel.dp_replicate, .dp_shard and .tp",
    "debug": "no counterpart",
    ("project", "trackio_*"): "with report_to=trackio, set these in trackers",
}
# fmt: on


def faults(config: Leaves, method: str) -> Iterator[tuple[str, str]]:
    if method not in ("sft", "pt", "pretrain"):
        return
    if exceeds(config, "gradient_accumulation_steps", 1):
        yield (
            "before transformers 4.46, accumulation averaged the means of micro-batches, which overweights short rows. "
            "In tune, every supervised token of the global batch has the same weight",
            "https://github.com/huggingface/transformers/pull/34191",
        )
    yield (
        "until July 2025 the loss was averaged per device (average_tokens_across_devices was false), so it depended on "
        "the number of devices. In tune it does not",
        "https://github.com/huggingface/transformers/issues/39392",
    )
