"""axolotl's configs (axolotl.utils.schemas)."""

from collections.abc import Iterator, Mapping
from typing import Any

from tune.migrate.converters import KEEP, Choose, Differs, To, with_index
from tune.migrate.leaves import KeyNames, Leaves, exceeds, is_set, text_of, values_of
from tune.migrate.migration import Convert, Migration, Peer
from tune.migrate.peers import common

OF_PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")


def marks(config: Leaves) -> list[bool]:
    return [
        "base_model" in config,
        "sequence_len" in config,
        "micro_batch_size" in config and "num_epochs" in config,
        "sample_packing" in config,
        bool(values_of(config, "datasets[].type", "test_datasets[].type")),
        "axolotl" in f"{[*config]} {text_of(config, '*')}",
    ]


def refused(config: Leaves) -> str:
    if is_set(config, "processor_type"):
        return "processor_type: this config trains on images or audio; recipes only train on text"
    if is_set(config, "relora*"):
        return "relora: no recipe merges and restarts adapters; docs/changes.md has an edit of lora_finetune that does"
    if is_set(config, "diffusion*"):
        return "diffusion: no recipe trains diffusion language models"
    if is_set(config, "process_reward_model"):
        return "process_reward_model: reward_finetune only scores whole answers"
    if "kd.kdplugin" in text_of(config, "plugins"):
        return "plugins: KDPlugin reads the teacher's log-probs from the data; tune run distill runs a teacher model"
    if is_set(config, "use_mora", "mora*"):
        return "mora: not supported; tune has LoRA, DoRA, PiSSA and OLoRA"
    if is_set(config, "hatchery*", "nemo_gym_enabled"):
        return "the config trains through an external service; no recipe does that"
    return ""


def method(config: Leaves) -> tuple[str, str]:
    if is_set(config, "reward_model"):
        return "reward", "reward_model"
    if is_set(config, "rl"):
        return str(config["rl"]), "rl"
    if is_set(config, "pretraining_dataset*"):
        return "pretrain", ""
    return "sft", ""


def defaults(config: Leaves, method: str) -> Leaves:
    usual: Leaves = {
        "num_epochs": 1,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "sequence_len": 512,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1.0e-8,
        "max_grad_norm": 1.0,
        "seed": 42,
        "bf16": "auto",
        "excess_length_strategy": "drop",
        "lora_dropout": 0.0,
        "warmup_ratio": 0.03,
    }
    rl = text_of(config, "rl")
    if rl in OF_PREFERENCES:
        usual |= {"rl_beta": 0.1}
    if rl == "simpo":
        usual |= {"simpo_gamma": 0.5, "cpo_alpha": 1.0}
    if is_set(config, "load_in_4bit"):
        usual |= {"bnb_config_kwargs.bnb_4bit_use_double_quant": True}
    if config.get("pretraining_dataset[0].path"):
        usual |= {"pretraining_dataset[0].type": "pretrain"}
    if is_set(config, "qat.*"):
        usual |= {"qat.weight_dtype": "int8"}
    if rl == "grpo":
        usual |= {
            "trl.epsilon": 0.2,
            "trl.beta": 0.0,
            "trl.num_generations": 8,
            "trl.max_completion_length": 512,
            "trl.temperature": 1.0,
            "trl.num_iterations": 1,
            "trl.scale_rewards": "group",
        }
    return usual


def faults(config: Leaves, method: str) -> Iterator[tuple[str, str]]:
    if exceeds(config, "gradient_accumulation_steps", 1) and method in ("sft", "pt", "pretrain"):
        yield (
            "accumulation averages the means of micro-batches, which overweights short rows (seen in axolotl 0.19.0; "
            "transformers fixed it in 4.46). In tune, every supervised token of the global batch has the same weight",
            "https://github.com/huggingface/transformers/pull/34191",
        )
    templates = text_of(config, "chat_template", "datasets[].type")
    is_gemma = "gemma" in text_of(config, "base_model")
    if is_gemma and ("gemma" in templates or "chat_template" in templates) and not is_set(config, "eot_tokens*"):
        yield (
            "without eot_tokens the end of a Gemma turn is not supervised, and the model does not learn to stop. tune "
            "supervises the end of turn that the template writes",
            "https://github.com/axolotl-ai-cloud/axolotl/pull/3756",
        )
    is_packed, base = is_set(config, "sample_packing"), text_of(config, "base_model")
    if is_packed and ("qwen3.5" in base or "qwen35" in base):
        yield (
            "in models with linear attention, packed documents leaked into the next one, and the loss fell to 0. In "
            "tune, these layers reset their state at each document",
            "https://github.com/axolotl-ai-cloud/axolotl/issues/3453",
        )
    kernels = ("attn_implementation", "flash_attention", "flex_attention", "sdp_attention", "xformers_attention")
    if is_packed and not is_set(config, *kernels):
        yield (
            "without flash attention, packed documents could attend to each other. In tune, attention stays inside "
            "each document on all hardware",
            "https://github.com/axolotl-ai-cloud/axolotl/issues/449",
        )
    if not is_set(config, "excess_length_strategy") and not method.startswith(("grpo", "rloo")):
        yield (
            "rows longer than sequence_len are dropped silently. tune counts them (dataset.too_long=drop is kept; "
            "truncate keeps their beginning)",
            "https://github.com/axolotl-ai-cloud/axolotl/pull/3068",
        )


# axolotl's dataset types, which render a row.
ROW_TYPES: Mapping[KeyNames, Any] = {
    "completion*": {"dataset.too_long": "split"},
    "*.intel": {"parts.data[].columns.prompt": "question"},
    (
        *("chat_template*", "sharegpt*", "input_output", "messages*", "chatml*", "llama3*", "bradley_terry*"),
        *("passthrough", "_synthetic", "*argilla*", "*ultra*", "zephyr*", "prompt_pairs"),
    ): KEEP,
    (
        *("alpaca*", "*instruct*", "oasst", "gpteacher*", "reflection", "explainchoice*", "concisechoice*"),
        *("summarizetldr*", "context_qa*", "metharme", "orcamini*", "pygmalion", "llama2_chat", "creative_acr*"),
    ): (
        {"tokenizer.chat_template": "plain"},
        "tune renders prompts as turns (User: ... Assistant: ...), not as axolotl's text; for a chat model, remove "
        "tokenizer.chat_template to use the model's own template",
    ),
    "*": (KEEP, common.ROWS),
}


def column(run: Migration, key: str, value: str) -> None:
    """Convert `field_chosen` and similar keys if the column has another name."""
    ours = key.rpartition(".field_")[2]
    if value in ("chosen", "rejected", "completion", "label"):
        run.same("", key)
    else:
        run.put(key, value, with_index(f"parts.data[].columns.{ours}", key))


def mapping(run: Migration, key: str, value: str) -> None:
    """Report a key of messages that tune does not read under its name in the data."""
    standard = {"role": ("role", "from"), "content": ("content", "value")}
    ours = key.rpartition(".")[2]
    if value == ours or value in standard.get(ours, ()):
        run.same("read under this name", key)
    else:
        run.missing("rename the keys of the messages: dataset.format=my_data.to_messages", key)


def roles_to_train(run: Migration, key: str, value: Any) -> None:
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if value in ("assistant", "gpt"):
        run.same("", key)
    else:
        run.put(key, value, "parts.train_on")


def by_name(*ours: str) -> Convert:
    """Convert a key that names a column or a key of messages: nothing to do if tune reads the name."""
    return Differs(f"tune reads {', '.join(ours)}; rename it, or set dataset.format=my_data.to_messages", unless=ours)


KEYS: dict[KeyNames, Convert] = {
    "base_model": common.model,
    "tokenizer_config": To("tokenizer.path", note="a name of the hub: download it, and give the folder"),
    "datasets[].field_tools": To("parts.data[].columns.tools", skip=("tools",)),
    "datasets[].message_field_training": by_name("train", "training"),
    "datasets[].message_property_mappings.*": mapping,
    "datasets[].message_field_role": by_name("role", "from"),
    "datasets[].message_field_content": by_name("content", "value"),
    ("datasets[].field_thinking", "datasets[].template_thinking_key"): by_name("reasoning_content", "thinking"),
    "shuffle_merged_datasets": Differs("tune shuffles the rows of all sources together", unless=(True,)),
    "output_dir": To("output_dir"),
    ("rl", "reward_model", "adapter"): To("recipe"),
    "lora_model_dir": To("adapter.path"),
    ("neftune_noise_alpha", "noisy_embedding_alpha"): common.embedding_noise,
    "rpo_alpha": common.supervised_term,
    "lora_r": To("adapter.rank"),
    "lora_alpha": To("adapter.alpha"),
    "lora_dropout": To("adapter.dropout"),
    "lora_target_modules": common.target_modules,
    "lora_target_parameters": To("adapter.target_parameters"),
    "lora_target_linear": To("parts.target_linear"),
    "lora_modules_to_save": To("adapter.modules_to_save"),
    "lora_rank_pattern": To("adapter.rank_pattern"),
    "lora_alpha_pattern": To("adapter.alpha_pattern"),
    "peft_use_dora": To("adapter.dora"),
    "peft_use_rslora": To("adapter.rank_stabilized"),
    "peft_init_lora_weights": Choose(
        "adapter.init", {(True, "default", "gaussian"): "default", "pissa*": "pissa", "olora": "olora"}
    ),
    "peft_trainable_token_indices": To("adapter.trainable_tokens"),
    "load_in_4bit": common.nf4,
    "bnb_config_kwargs.bnb_4bit_use_double_quant": To("model.double_quantization"),
    "sequence_len": To("max_seq_len"),
    "excess_length_strategy": Choose("dataset.too_long", {"drop": "drop", "truncate": "truncate", "raise": "error"}),
    "sample_packing": To("packed"),
    "train_on_inputs": Choose("parts.train_on", {True: "all", False: KEEP}),
    "chat_template": Choose("tokenizer.chat_template", common.TEMPLATES),
    "special_tokens.eos_token": To("tokenizer.eos_token"),
    "val_set_size": To("dataset.validation_fraction", note=common.HELD_OUT),
    ("datasets[].path", "pretraining_dataset[].path"): To("parts.data[].path"),
    ("datasets[].name", "pretraining_dataset[].name"): To("parts.data[].subset"),
    ("datasets[].split", "pretraining_dataset[].split"): To("parts.data[].split"),
    ("datasets[].data_files", "pretraining_dataset[].data_files"): To("parts.data[].data_files"),
    ("datasets[].field", "datasets[].text_column", "pretraining_dataset[].text_column"): To(
        "parts.data[].columns.text", skip=("text",)
    ),
    "datasets[].field_messages": To("parts.data[].columns.messages", skip=("messages", "conversations")),
    "datasets[].type": Choose(None, ROW_TYPES),
    ("datasets[].type.field_instruction", "datasets[].type.field_human"): To("parts.data[].columns.instruction"),
    "datasets[].type.field_output": To("parts.data[].columns.output"),
    "datasets[].type.field_input": To("parts.data[].columns.input"),
    "datasets[].type.field_system": To("parts.data[].columns.system"),
    "datasets[].type.field_prompt": To("parts.data[].columns.prompt"),
    (
        *("datasets[].type.field_chosen", "datasets[].type.field_rejected", "datasets[].type.field_completion"),
        *("datasets[].type.field_label", "datasets[].field_chosen", "datasets[].field_rejected"),
    ): column,
    "datasets[].roles_to_train": roles_to_train,
    ("datasets[].train_on_eos", "datasets[].train_on_eot"): Choose(
        "parts.data[].train_on_end_of_turn",
        {
            ("turn", "all", True): True,
            ("none", False): False,
            "last": (True, "the end of every answer is supervised, not only of the last one"),
        },
    ),
    "pretraining_dataset[].type": Choose("dataset.streaming", {"*": True}),
    "test_datasets[].path": To("parts.validation[].path"),
    "test_datasets[].name": To("parts.validation[].subset"),
    "test_datasets[].split": To("parts.validation[].split"),
    "test_datasets[].data_files": To("parts.validation[].data_files"),
    "num_epochs": To("epochs"),
    "max_steps": To("max_steps", skip=(-1,)),
    "micro_batch_size": To("parts.micro_batch_size"),
    "batch_size": To("parts.global_batch_size"),
    "gradient_accumulation_steps": To("parts.accumulation"),
    "learning_rate": To("optimizer.lr"),
    "optimizer": Choose("optimizer._component_", common.OPTIMIZERS),
    "weight_decay": To("optimizer.weight_decay"),
    "adam_beta1": To("parts.beta1"),
    "adam_beta2": To("parts.beta2"),
    ("adam_epsilon", "adam_eps"): To("optimizer.eps"),
    "max_grad_norm": To("max_grad_norm", value=common.none_if_zero),
    "lr_scheduler": Choose("schedule._component_", common.SCHEDULERS),
    ("lr_scheduler_kwargs.min_lr", "eta_min"): To("parts.min_lr"),
    ("lr_scheduler_kwargs.min_lr_rate", "cosine_min_lr_ratio"): To("parts.min_ratio"),
    "warmup_steps": To("parts.warmup_steps"),
    "warmup_ratio": To("parts.warmup_ratio"),
    "loraplus_lr_ratio": To("parameter_groups.lr_ratios", value=lambda ratio: {"lora_b": ratio}),
    "embedding_lr_scale": To("parameter_groups.lr_ratios", value=lambda ratio: {"embedding": ratio}),
    ("bf16", "bfloat16"): To("parts.bf16"),
    ("fp16", "float16"): To("parts.fp16"),
    "gradient_checkpointing": common.activation_checkpointing,
    "activation_offloading": Choose("compute.activation_offload", {(True, "legacy", "disk"): True, False: False}),
    "torch_compile": Choose("compute.compile", {(True, "auto"): True, False: False}),
    ("deepspeed", "fsdp", "fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy"): common.layout,
    ("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params"): To("compute.cpu_offload"),
    ("fsdp_config.fsdp_activation_checkpointing", "fsdp_config.activation_checkpointing"): common.on_off_checkpointing,
    "dp_replicate_size": To("parallel.dp_replicate"),
    "dp_shard_size": To("parallel.dp_shard"),
    "tensor_parallel_size": To("parallel.tp"),
    ("context_parallel_size", "sequence_parallel_degree"): To("parallel.cp"),
    "expert_parallel_size": To("parallel.ep"),
    "eval_steps": To("evaluate.every"),
    "evals_per_epoch": Differs(
        "evaluate.every counts optimizer steps; if unset, validation runs after the last step", unless=(0,)
    ),
    "saves_per_epoch": Differs("checkpointer.every counts optimizer steps; the last step is also saved"),
    "save_steps": To("checkpointer.every"),
    "save_strategy": common.save_strategy,
    "save_total_limit": To("checkpointer.keep"),
    "load_best_model_at_end": common.keep_best,
    "early_stopping_patience": To("checkpointer.patience"),
    "logging_steps": To("parts.console_every"),
    "use_tensorboard": To("parts.trackers.TensorBoard"),
    "wandb_project": To("parts.trackers.WeightsAndBiases"),
    ("wandb_name", "wandb_run_id"): To("parts.run_name"),
    "fp8": common.float8,
    "qat.weight_dtype": common.rounded_weights,
    "seed": To("seed"),
    ("rl_beta", "dpo_beta", "orpo_alpha"): To("kl", "loss.beta"),
    "dpo_label_smoothing": To("loss.label_smoothing"),
    "simpo_gamma": To("parts.gamma"),
    "cpo_alpha": To("parts.nll"),
    "kto_desirable_weight": To("loss.desirable"),
    "kto_undesirable_weight": To("loss.undesirable"),
    "center_rewards_coefficient": To("loss.center"),
    "trl.beta": To("kl", "loss.beta"),
    "trl.num_generations": To("group_size"),
    "trl.max_completion_length": To("sampling.max_new_tokens"),
    "trl.top_k": To("sampling.top_k", skip=(0, -1)),
    "trl.temperature": To("sampling.temperature"),
    "trl.min_p": To("sampling.min_p"),
    "trl.top_p": To("sampling.top_p", skip=(1,)),
    "trl.num_iterations": To("updates"),
    "trl.epsilon": common.ratio_bounds,
    "trl.epsilon_high": To("loss.high"),
    "trl.mask_truncated_completions": To("mask_truncated"),
    "trl.scale_rewards": common.scale_rewards,
    "trl.importance_sampling_level": common.importance_sampling,
    "max_prompt_len": To("max_prompt_len"),
}

# fmt: off
ALWAYS: dict[KeyNames, str] = {
    ("flash_attention", "xformers_attention", "sdp_attention", "sdpa_attention", "eager_attention", "flex_attention",
     "sage_attention", "sdpa_varlen", "attn_implementation", "fused_attn_kernel", "gemma4_hybrid_attn_impl",
     "large_head_attention", "flash_attn_*", "flash_optimum", "flex_attn_compile_kwargs*", "pretrain_multipack_attn",
     "batch_flattening"):
        "the hardware decides the kernel; attention stays inside each document",
    ("plugins", "liger_*", "cut_cross_entropy", "chunked_cross_entropy*", "unsloth_*", "use_kernels",
     "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "tiled_mlp*", "use_scattermoe",
     "use_sonicmoe", "experts_implementation", "expert_backend", "expert_parallel_*", "moe_*", "torchdistx_path",
     "dense_mixer"):
        "the loss is computed in chunks of tokens, experts as grouped products; compute.compile=true fuses the rest",
    ("tf32", "torch_dtype", "device", "device_map", "ddp", "ddp_*", "local_rank", "world_size", "gc_collect_steps",
     "gc_steps", "torch_empty_cache_steps", "low_cpu_mem_usage", "max_memory", "gpu_memory_limit",
     "experimental_skip_move_to_device", "lora_on_cpu", "qlora_sharded_model_loading", "accelerator_config*",
     "torch_compile_*", "ple_cpu_offload", "deepcompile", "layer_offloading", "fp32_norms", "fp32_norm_classes",
     "peft_autocast_adapter_dtype"):
        "decided by the library and the hardware",
    ("model_type", "tokenizer_type", "type_of_model", "is_*_derived_model", "cls_model_config",
     "num_labels", "tokenizer_use_fast", "tokenizer_legacy", "tokenizer_use_mistral_common",
     "tokenizer_save_jinja_files", "lora_fan_in_fan_out",
     "trust_remote_code", "datasets[].trust_remote_code", "llama4_linearized_experts"):
        "read from the checkpoint's config.json and tokenizer",
    ("dataset_prepared_path", "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory",
     "skip_prepare_dataset", "dataloader_*", "remove_unused_columns", "preprocess_iterable", "is_preprocess",
     "datasets[].ds_type", "datasets[].preprocess_shards", "sample_packing_group_size", "sample_packing_bin_size",
     "sample_packing_sequentially", "sample_packing_mp_start_method", "sample_packing_eff_est", "eval_sample_packing",
     "pad_to_sequence_len", "pad_to_multiple_of", "multipack_real_batches", "group_by_length", "total_num_tokens",
     "total_supervised_tokens", "streaming_multipack_buffer_size", "pretrain_multipack_buffer_size",
     "pretraining_sample_concatenation"):
        "rows are tokenized once, cached, shuffled and packed without a setting",
    ("eval_batch_size", "eval_strategy", "evaluation_strategy"):
        "validation runs at the end and every evaluate.every steps",
    ("save_only_model", "save_safetensors", "save_first_step"):
        "a checkpoint every checkpointer.every=500 steps and at the end; safetensors",
    "special_tokens.pad_token":
        "decided by the tokenizer and the template; padding is never supervised, even if pad is EOS",
    ("precompute_ref_log_probs", "dpo_padding_free", "dpo_use_logits_to_keep", "dpo_use_liger_kernel",
     "trl.use_liger_loss"):
        "reference=precomputed",
    ("strict", "use_wandb", "wandb_watch", "wandb_log_model", "wandb_mode", "wandb_entity",
     "include_tokens_per_second", "include_tkps", "axolotl_config_path", "debug", "metric_for_best_model",
     "greater_is_better", "hf_use_auth_token", "use_ray", "ray_*", "resources_per_worker"):
        "nothing to set: unknown keys are rejected, speed is logged, secrets are not stored",
    ("trl.use_vllm", "trl.vllm_*", "vllm.*"):
        "the policy samples in the same process; sampling._component_=tune.generation.VLLM samples with vLLM",
    ("trl.log_completions", "trl.num_completions_to_print", "trl.generation_batch_size", "trl.log_multimodal",
     "trl.loss_type", "trl.use_data_producer", "trl.async_prefetch", "trl.prefetch_depth", "trl.streaming_*",
     "trl.replay_*"):
        "the policy samples in the same process",
    ("fsdp_config.*", "fsdp_version", "fsdp_final_state_dict_type", "merge_lora", "merge_method"):
        "parallel.dp_shard=auto shards each block (FSDP2)",
    "gradient_checkpointing_kwargs*": "activation checkpointing is always non-reentrant",
    ("resume_from_checkpoint", "auto_resume_from_checkpoints"):
        "resume=auto continues the run in output_dir; other libraries' checkpoints are not read",
}

LACKING: dict[KeyNames, str] = {
    ("base_model_config", "model_config.*", "overrides_of_model_*"):
        "change config.json in a copy of the checkpoint's folder",
    "resize_token_embeddings_to_32x": "the embedding keeps the rows of the checkpoint",
    ("datasets[].shards", "datasets[].shards_idx"):
        "all rows are read: write the shard to a file, or set dataset.filter to a function that drops rows",
    "test_datasets[].*": "the columns of a row determine its format, and the chat template renders it",
    ("datasets[].field_human", "datasets[].roles.*", "datasets[].conversation",
     "datasets[].input_format", "datasets[].type.format", "datasets[].type.*_format", "datasets[].field_model",
     "datasets[].input_transform"):
        ("the columns of a row determine its format, and the chat template renders it; for other rows set "
         "dataset.format=my_data.to_messages"),
    "datasets[].chat_template*": "one template renders all rows: set tokenizer.chat_template",
    "datasets[].revision": "download the revision, and give its files",
    "datasets[].split_thinking": "<think> inside of an answer stays in its content",
    ("special_tokens.bos_token", "special_tokens.unk_token", "eot_tokens"):
        "the tokenizer's own, and the end of turn that the template writes",
    ("special_tokens.additional_special_tokens", "fix_untrained_tokens"): "add tokens to the base with tune add-tokens",
    "eval_sequence_len": "validation rows have max_seq_len, too",
    ("processor_type", "process_reward_model", "float32", "dpo_generate_during_eval"): "no counterpart",
    ("trl.reward_funcs", "trl.reward_weights"):
        "write a reward function (row, completion) -> number and set reward=my_rewards.is_right",
    "load_in_8bit": "8-bit bases are not supported: the base stays in 16 bits; model.quantization=nf4 uses 4 bits",
    "quantize_moe_experts": "experts stay in 16 bits: NF4 only covers linear layers",
    ("gptq*", "model_quantization_config*", "nonexpert_quantization", "use_onebitllms", "dsv4_*", "gemma4_fp8_*",
     "gemma4_nf4_*", "nvfp4_*", "use_dsv4_kernels", "use_glm_dsa_kernels"):
        "bases in this format are not supported; use the 16-bit checkpoint",
    ("qat*", "quantization.*", "quantization", "llmcompressor*"):
        ("docs/changes.md#weights-rounded-in-training rounds the weights in the groups of tune quantize; "
         "activations are not rounded"),
    ("fp8_config*", "fp8_enable_fsdp_float8_all_gather"):
        "float8 is only used for matrix products; FSDP gathers in 16 bits",
    ("unfrozen_parameters", "freeze_mm_modules", "spectrum_*", "lisa_*"):
        "either all parameters or adapters are trained; docs/changes.md shows how to freeze layers",
    ("peft_layers_to_transform", "peft_layers_pattern", "peft_layer_replication", "peft_ensure_weight_tying",
     "loftq_config*", "peft.*"):
        "name the layers: adapter.target_modules accepts a regular expression",
    ("lr_quadratic_warmup", "cosine_constant_lr_ratio", "lr_div_factor", "lr_scheduler_kwargs*", "jagged_*",
     "relora*"):
        "schedules only have warmup and min_ratio",
    ("lr_groups*", "embedding_lr", "loraplus_lr_embedding"): "set ratios by name in parameter_groups.lr_ratios",
    ("optim_args*", "optim_target_modules", "adam_beta3", "adam_epsilon2", "dion_*", "qgalore_*", "grokfast_*",
     "came_*"):
        "tune does not have the optimizer of this argument",
    ("use_eaft*", "eaft_*", "use_pose", "pose_*", "scaling_softmax*",
     "curriculum_sampling", "use_dft_loss", "dpo_loss_type", "dpo_loss_weights", "dpo_use_weighting",
     "dpo_norm_loss", "s2_attention"):
        "this training method is not supported",
    ("default_system_message", "datasets[].drop_system_message", "datasets[].field_system",
     "datasets[].system_prompt", "datasets[].type.system_prompt", "chat_template_jinja", "chat_template_kwargs*"):
        ("the rows' own system message and the checkpoint's template are used; for your own template set "
         "tokenizer.chat_template=mine.jinja"),
    ("min_sample_len", "dataset_exact_deduplication", "datasets[].skip", "datasets[].temperature",
     "datasets[].logprobs_field", "datasets[].message_field_training_detail", "datasets[].length",
     "datasets[].sequence_length", "datasets[].*_input_id", "datasets[].seed", "pretraining_dataset[].skip",
     "pretraining_dataset[].temperature", "pretraining_dataset[].logprobs_field",
     "pretraining_dataset[].message_field_training_detail", "pretraining_dataset[].length",
     "pretraining_dataset[].sequence_length", "pretraining_dataset[].*_input_id", "pretraining_dataset[].seed",
     "dataset_shard_*", "num_dataset_shards_to_save", "shuffle_before_merging_datasets", "train_on_last_step_only",
     "pretraining_dataset[].trust_remote_code"):
        "set dataset.filter to a function that drops rows",
    ("tokens", "added_tokens_overrides*", "mean_resizing_embeddings", "shrink_embeddings", "embeddings_skip_upcast",
     "reinit_weights"):
        "add tokens to the base with tune add-tokens",
    "loss_watchdog_*": "checkpointer.on_nan sets the response to a loss that is not finite",
    ("auto_find_batch_size", "dynamic_checkpoint*", "selective_checkpointing*"):
        "see compute.activation_checkpointing=selective",
    "profiler_steps*": "an edit of a copied recipe: docs/changes.md#a-trace-of-some-steps",
    ("do_causal_lm_eval", "do_bench_eval", "eval_causal_lm_metrics", "eval_table_size", "eval_max_new_tokens",
     "bench_*", "lm_eval_*", "generate_samples", "num_generation_*", "generation_*"):
        "evaluate.tasks and evaluate.prompts evaluate during training",
    ("hub_*", "push_dataset_to_hub", "use_mlflow", "use_comet", "use_trackio", "use_swanlab", "use_otel_metrics",
     "mlflow_*", "hf_mlflow_*", "comet_*", "trackio_*", "swanlab_*", "gradio_*", "otel_*"):
        "use wandb, tensorboard, or trackers for MLflow and Trackio; tune push uploads a model",
    ("ring_attn_func", "heads_k_stride"): "no counterpart",
    ("ebft*", "kd_*", "diffusion*", "trl.*", "use_mora", "mora*", "hatchery*", "nemo_gym_*", "revision_of_model",
     "datasets[]*", "pretraining_dataset[]*", "streaming", "trainer_cls", "image_size", "image_resize_algorithm",
     "role_boundaries*", "processor_kwargs*", "capabilities*", "env_capabilities*", "use_*_loss", "large_*",
     "max_packed_sequence_len", "rope_scaling*"):
        "no counterpart",
}
# fmt: on

AXOLOTL = Peer(
    name="axolotl",
    looks_like="base_model, sequence_len, datasets with a type",
    marks=marks,
    refused=refused,
    method=method,
    has_adapter=lambda config: is_set(config, "adapter"),
    # TRL's trainers disable adapter dropout too.
    has_no_dropout=lambda config, method: method in (*OF_PREFERENCES, "reward"),
    defaults=defaults,
    faults=faults,
    keys=KEYS,
    always=ALWAYS,
    lacking=LACKING,
    empty_lists=("datasets[].roles_to_train",),
    read_from={"axolotl": "0.19.0", "trl": "1.16.0"},
)
