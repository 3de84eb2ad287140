"""LLaMA-Factory's configs: the first form (model_args, finetuning_args, ...) and the second (v1)."""

from collections.abc import Iterator
from typing import Any

from tune.migrate.converters import KEEP, Choose, Differs, To
from tune.migrate.leaves import KeyNames, Leaves, exceeds, is_set, text_of, values_of
from tune.migrate.migration import Convert, Migration, Peer
from tune.migrate.peers import common, training_arguments

BREAKS = "LLaMA-Factory separates an instruction from its input by one line break, tune by two"
CHATS = "this config is for inference. Use tune chat MODEL or tune generate MODEL"
MEDIA = (
    *("_vl", "llava", "paligemma", "pixtral", "mllama", "internvl", "minicpm_v", "minicpm_o", "omni", "kimi_vl"),
    *("glm4v", "moss_vl", "video", "audio"),
)


def marks(config: Leaves) -> list[bool]:
    keys = (
        *("stage", "finetuning_type", "cutoff_len", "model_class", "peft_config.name", "train_dataset"),
        *("infer_backend", "export_dir"),
    )
    return [*(bool(values_of(config, key, f"*.{key}")) for key in keys), bool(text_of(config, "template"))]


def refused(config: Leaves) -> str:
    if is_set(config, "export_dir", "peft_config.export_dir"):
        return (
            "export_dir: this config exports a model. To merge an adapter use tune merge BASE ADAPTER OUT; to "
            "quantize, tune quantize MODEL --to KIND --out FOLDER; to write GGUF, tune export RUN"
        )
    if is_set(config, "task") and not is_set(config, "stage"):
        return "task: this config evaluates. Use tune eval MODEL --tasks NAME"
    if is_set(config, "do_predict") and not is_set(config, "do_train"):
        return (
            "do_predict: this config evaluates. Use tune eval MODEL --data FILE --score FUNCTION, or tune generate to "
            "answer prompts"
        )
    if is_set(config, "infer_backend") and not (is_set(config, "stage") and is_set(config, "do_train")):
        return f"infer_backend: {CHATS}"
    if is_set(config, "sample_backend") and not is_set(config, "train_dataset", "output_dir"):
        return f"sample_backend: {CHATS}"
    if is_set(config, "image_max_pixels", "image_min_pixels", "video_*", "media_dir", "audio_*"):
        return "the config trains on images, video or audio; recipes only train on text"
    if any(word in text_of(config, "template") for word in MEDIA):
        return "template: this is a template for images, video or audio; recipes only train on text"
    if any(word in text_of(config, "dataset") for word in ("mllm_", "llava")):
        return "dataset: this dataset has images; recipes only train on text"
    if is_set(config, "task"):
        return "task: this config evaluates. Use tune eval MODEL --tasks NAMES"
    return ""


def method(config: Leaves) -> tuple[str, str]:
    if is_set(config, "stage"):
        return str(config["stage"]), "stage"
    if "dpo" in text_of(config, "train_dataset"):
        return "dpo", "train_dataset"
    return "sft", ""


def has_adapter(config: Leaves) -> bool:
    kind = text_of(config, "finetuning_type", "peft_config.name")
    return "lora" in kind or "oft" in kind


def defaults(config: Leaves, method: str) -> Leaves:
    is_second_form = is_set(config, "model_class", "train_dataset", "peft_config.name")
    usual = {} if is_second_form else FIRST_FORM
    if is_set(config, "streaming"):
        usual = usual | {"buffer_size": 16384}
    stage = text_of(config, "stage")
    if "dpo" in stage or "kto" in stage:
        usual = usual | {"pref_beta": 0.1}
    if stage == "ppo":
        usual = usual | {
            "ppo_epochs": 4,
            "ppo_target": 6.0,
            "temperature": 0.95,
            "top_p": 0.7,
            "top_k": 50,
            "max_new_tokens": 1024,
        }
    if is_second_form:
        usual = usual | SECOND_FORM
    if is_set(config, "quantization_bit"):
        usual = usual | {"double_quantization": True}
    if is_set(config, "quant_config.quantization_bit"):
        usual = usual | {"quant_config.double_quantization": True}
    return usual


FIRST_FORM: Leaves = {
    "finetuning_type": "lora",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5.0e-5,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1.0e-8,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "bf16": False,
    "seed": 42,
    "cutoff_len": 2048,
    "lora_rank": 8,
    "lora_dropout": 0.0,
    "lora_target": "all",
    "simpo_gamma": 0.5,
    "save_steps": 500,
    "disable_gradient_checkpointing": False,
}
SECOND_FORM: Leaves = {
    "micro_batch_size": 1,
    "learning_rate": 1.0e-4,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.01,  # torch's AdamW
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1.0e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "cutoff_len": 2048,
    "bf16": True,
    "seed": 42,
    "enable_activation_checkpointing": True,
    "peft_config.r": 8,
    "peft_config.lora_alpha": 16,
    "peft_config.lora_dropout": 0.05,
    "peft_config.target_modules": "all",
}


def faults(config: Leaves, method: str) -> Iterator[tuple[str, str]]:
    if is_set(config, "packing") and not is_set(config, "neat_packing"):
        yield (
            "packing without neat_packing lets the documents of a row attend to each other. In tune, attention stays "
            "inside each document",
            "https://github.com/hiyouga/LlamaFactory/issues/4744",
        )
    if is_set(config, "cutoff_len"):
        yield (
            "long rows lose part of both prompt and answer, mid-sentence and uncounted. In tune, conversations are cut "
            "after a whole message, and cut rows are counted",
            "https://github.com/hiyouga/LlamaFactory/pull/5458",
        )
    template = text_of(config, "template")
    if "qwen" in template or "chatml" in template:
        yield (
            "the line break after <|im_end|> is supervised, but is never generated. In tune, <|im_end|> is the last "
            "supervised token, so the losses differ by about 0.1%",
            "https://github.com/hiyouga/LlamaFactory/issues/7306",
        )
    if text_of(config, "pref_loss") in ("ipo", "hinge", "kto_pair") and config.get("stage") == "dpo":
        yield (
            "pref_loss is not passed to TRL's dpo_loss, so training uses DPO's sigmoid loss (of mean log-probs with "
            "ipo). tune uses the loss that is named",
            "https://github.com/hiyouga/LlamaFactory/blob/v0.9.5/src/llamafactory/train/dpo/trainer.py",
        )
    yield from training_arguments.faults(config, method)


def named_datasets(run: Migration, key: str, value: Any) -> None:
    """Convert names in data/dataset_info.json to the file names they usually have."""
    part, folder = ("validation" if "eval" in key else "data"), run.theirs.get("dataset_dir") or "data"
    for index, name in enumerate(value if isinstance(value, list) else common.listed(str(value))):
        if name.endswith((".yaml", ".yml")):
            run.missing(f"{name} is a list of datasets: set dataset.path to an entry of that list", key)
        elif "/" in name or "." in name or folder == "ONLINE":  # on the hub
            run.set(f"parts.{part}[{index}].path", name, key)
        else:
            note = f"check the path: dataset_info.json has the location of '{name}'"
            if index == 0:
                note += f"; {BREAKS}"
            run.set(f"parts.{part}[{index}].path", f"{folder}/{name}.json", key, note=note)


preference_losses = Choose(
    "loss._component_",
    {
        "sigmoid": "tune.losses.DPO",
        "ipo": "tune.losses.IPO",
        "simpo": "tune.losses.SimPO",
        "orpo": "tune.losses.ORPO",
        "kto_pair": ("tune.losses.KTO", "tune splits each pair into a good and a bad answer"),
    },
)


def preference_loss(run: Migration, key: str, value: str) -> None:
    """Convert pref_loss, which stage kto ignores."""
    if run.method == "kto":
        run.same("stage: kto has its own loss", key)
    else:
        preference_losses(run, key, value)
        if value == "kto_pair":
            run.set("dataset.kind", "labelled", key)


def ppo_target(run: Migration, key: str, value: float) -> None:
    """Set the weights of TRL 0.9's PPO, which LLaMA-Factory uses and no key of its configs changes."""
    if run.recipe == "ppo_finetune":
        note = f"in LLaMA-Factory it starts at 0.2 and adapts to the target {value}; in tune it is constant"
        run.put(key, 0.2, "kl", note=note)
        run.put(key, 0.1, "value_weight")
    else:
        run.same("only stage: ppo uses it", key)


def reward_model(run: Migration, key: str, value: str) -> None:
    is_adapter = run.theirs.get("reward_model_type", "lora") != "full"
    note = "an adapter in LLaMA-Factory: merge it into a model with tune merge" if is_adapter else ""
    common.reward_model(run, key, value, note)


KEYS: dict[KeyNames, Convert] = {
    "enable_thinking": Differs(
        "the chat template decides: set tokenizer.chat_template to a copy of it", unless=(True,)
    ),
    "ignore_pad_token_for_loss": Differs("padding is never supervised", unless=(True,)),
    "model_revision": Differs("download the revision, and set model.path to its folder", unless=("main",)),
    "quantization_type": Differs("the base is quantized to nf4", unless=("nf4",)),
    ("model_name_or_path", "model"): common.model,
    "stage": To("recipe"),
    ("adapter_name_or_path", "peft_config.adapter_name_or_path"): To("adapter.path"),
    ("finetuning_type", "peft_config.name"): Choose(
        "recipe",
        {
            ("lora", "full"): True,
            "oft": (True, "tune does not have orthogonal adapters; LoRA replaces them"),
            "freeze": (True, "all layers are trained; docs/changes.md shows how to freeze some"),
        },
    ),
    ("lora_rank", "peft_config.r"): To("adapter.rank"),
    ("lora_alpha", "peft_config.lora_alpha"): To("adapter.alpha"),
    ("lora_dropout", "peft_config.lora_dropout"): To("adapter.dropout"),
    ("lora_target", "peft_config.target_modules"): common.target_modules,
    ("additional_target", "peft_config.modules_to_save"): To("adapter.modules_to_save", value=common.listed),
    ("peft_config.use_rslora", "use_rslora"): To("adapter.rank_stabilized"),
    ("peft_config.use_dora", "use_dora"): To("adapter.dora"),
    "pissa_init": Choose(
        "adapter.init",
        {
            True: ("pissa", "an exact SVD; LLaMA-Factory's is approximate unless pissa_iter is -1"),
            False: "default",
        },
    ),
    "loraplus_lr_ratio": To("parameter_groups.lr_ratios", value=lambda ratio: {"lora_b": ratio}),
    ("quant_config.quantization_bit", "quantization_bit"): Choose(("model.quantization", "quantization"), {4: "nf4"}),
    ("quant_config.double_quantization", "double_quantization"): To("model.double_quantization"),
    "pure_bf16": Choose(None, {True: {"parts.bf16": True, "parts.dtype_of_weights": "bf16"}, False: KEEP}),
    "train_from_scratch": common.random_weights,
    "template": Choose("tokenizer.chat_template", common.TEMPLATES),
    ("eval_dataset", "dataset", "train_dataset"): named_datasets,
    "max_samples": To("parts.take"),
    "mix_strategy": To("parts.mix_strategy"),
    "interleave_probs": To("parts.mix_weights"),
    "cutoff_len": To("max_seq_len"),
    "train_on_prompt": Choose(
        "parts.train_on",
        {
            True: (
                "all",
                "LLaMA-Factory counts the first token of a row, which nothing predicts; so its loss is lower",
            ),
            False: KEEP,
        },
    ),
    "mask_history": Choose("parts.train_on", {True: "last", False: KEEP}),
    "packing": To("packed"),
    "neat_packing": Choose("packed", {True: True, False: KEEP}),
    "streaming": To("dataset.streaming"),
    "buffer_size": To("dataset.shuffle_buffer"),
    "val_size": To("dataset.validation_fraction", note=common.HELD_OUT),
    "micro_batch_size": To("parts.micro_batch_size"),
    "global_batch_size": To("parts.global_batch_size"),
    "pref_loss": preference_loss,
    "pref_beta": To("loss.beta"),
    "dpo_label_smoothing": To("loss.label_smoothing"),
    "simpo_gamma": To("parts.gamma"),
    "kto_chosen_weight": To("loss.desirable"),
    "kto_rejected_weight": To("loss.undesirable"),
    "ppo_epochs": To("updates"),
    "ppo_target": ppo_target,
    "reward_model": reward_model,
    "ref_model": common.model,
    "disable_gradient_checkpointing": Choose("compute.activation_checkpointing", {False: "full", True: "none"}),
    "enable_activation_checkpointing": common.on_off_checkpointing,
    "use_unsloth_gc": Choose("compute.activation_checkpointing", {True: "full", False: KEEP}),
    "use_muon": Choose(
        "optimizer._component_",
        {True: ("tune.optimizers.Muon", "torch's Muon, which rounds to bf16 at other points"), False: KEEP},
    ),
    ("dist_config.cp_size", "dist_config.context_parallel_size", "cp_size", "context_parallel_size"): To("parallel.cp"),
    ("dist_config.ep_size", "dist_config.expert_model_parallel_size", "ep_size", "expert_model_parallel_size"): To(
        "parallel.ep"
    ),
    ("dist_config.tp_size", "dist_config.tensor_model_parallel_size", "tp_size", "tensor_model_parallel_size"): To(
        "parallel.tp"
    ),
    "pipeline_model_parallel_size": To("parallel.pp"),
    ("dist_config.mp_replicate_size", "dist_config.dp_replicate_size"): To("parallel.dp_replicate"),
    "max_new_tokens": To("sampling.max_new_tokens", "evaluate.max_new_tokens"),
    "top_k": To("sampling.top_k", skip=(0, -1)),
    "temperature": To("sampling.temperature"),
    "top_p": To("sampling.top_p", skip=(1,)),
    "optim_config.name": Choose("optimizer._component_", common.OPTIMIZERS),
    "lr_scheduler_config.name": Choose("schedule._component_", common.SCHEDULERS),
    "fp8": common.float8,
    "enable_torch_profiler": common.trace,
}

# fmt: off
ALWAYS: dict[KeyNames, str] = {
    ("freeze_vision_tower", "freeze_multi_modal_projector", "trust_remote_code", "use_fast_tokenizer",
     "model_class", "cache_dir", "low_cpu_mem_usage", "infer_dtype", "infer_backend", "sample_backend",
     "use_kv_cache", "offload_folder", "device_map",
     "block_diag_attn", "model_max_length", "compute_dtype", "print_param_status", "upcast_layernorm",
     "upcast_lmhead_output"):
        "decided by the checkpoint and the hardware",
    ("flash_attn", "enable_liger_kernel", "use_unsloth", "use_v1_kernels", "kernel_config*", "use_reentrant_gc",
     "mixture_of_depths_off", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion",
     "masked_softmax_fusion", "gradient_accumulation_fusion", "moe_grouped_gemm", "moe_token_dispatcher_type",
     "attention_backend"):
        "the hardware decides the kernel; compute.compile=true fuses",
    ("use_distributed_optimizer", "sequence_parallel", "overlap_*", "use_mca", "recompute_*", "dist_config.name",
     "dist_config.dcp_path", "dist_config.ep_dispatcher", "dist_config.backend", "dist_config.timeout",
     "dist_config.*mesh*", "dist_config.ep_fsdp_size", "dist_config.enable_*", "dist_config.mixed_precision",
     "dist_config.cpu_ram_efficient_loading", "dist_config.reshard_after_forward", "cp_mode", "dp_shard_size",
     "master_addr", "master_port", "ray_*", "batching_workers"):
        "parallel.dp_shard=auto shards each block (FSDP2)",
    ("overwrite_cache", "preprocessing_num_workers", "preprocessing_num_worker", "preprocessing_batch_size",
     "dataset_dir", "data_shared_file_system", "eval_on_each_dataset", "batching_strategy", "disable_shuffling_off"):
        "rows are tokenized once, cached and shuffled; the checkpoint's template does the rest",
    ("plot_loss", "compute_accuracy", "include_effective_tokens_per_second", "logging_dir", "save_ckpt_as_hf",
     "save_hf_model"):
        "report.html has the curves; loss.accuracy=true logs the accuracy",
    ("lora_alpha_is_twice", "kto_*_off", "ppo_buffer_size", "pissa_iter", "pissa_convert",
     "quantization_method", "quantization_device_map",
     "quant_config.name", "peft_config.task_type", "evaluation_strategy"):
        "nothing to set",
    ("do_sample", "num_beams", "length_penalty", "skip_special_tokens", "eval_num_beams", "predict_with_generate",
     "max_length", "repetition_penalty"):
        "for generation: see docs/using.md",
}

LACKING: dict[KeyNames, str] = {
    "split_special_tokens": "special tokens in the text of a row are special tokens; the data table counts them",
    ("resize_vocab", "init_config*"): "add tokens to the base with tune add-tokens",
    "tokenized_path": "dataset.path reads tokens from a column input_ids",
    ("tool_format", "preserve_thinking"): "the chat template decides: set tokenizer.chat_template",
    ("ref_model_adapters", "ref_model_quantization_bit"):
        "the reference must be a folder with all weights: merge adapters with tune merge",
    "peft_config.bias": "biases are not trained with an adapter",
    "shift_attn": "tune uses the model's own attention, not S2 attention",
    ("image_*", "video_*", "audio_*", "media_dir", "crop_to_patches", "use_audio_in_video"): "no counterpart",
    ("swanlab_*", "use_swanlab"): "use wandb, tensorboard, mlflow or trackio",
    ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "peft_config.freeze_*",
     "freeze_language_model", "use_llama_pro"):
        "either all parameters or adapters are trained; docs/changes.md shows how to freeze layers",
    ("oft_*", "module_dropout", "peft_config.oft_*", "peft_config.block_size", "peft_config.module_dropout"):
        "tune has LoRA, DoRA, PiSSA and OLoRA",
    ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_hyper_parallel", "galore_*", "apollo_*",
     "badam_*", "hyper_parallel_*"):
        ("tune does not have this optimizer; AdamW replaces it. To save memory, use compute.cpu_offload or update each "
         "parameter during the backward pass (docs/changes.md)"),
    "fp8_*": "float8 is only used for matrix products; FSDP gathers in 16 bits",
    ("use_kt", "kt_*", "kt_config*"):
        "KTransformers is not supported; compute.cpu_offload=true keeps the shards in host memory",
    ("mixture_of_depths", "moe_aux_loss_coef", "use_dft_loss", "use_asft_loss", "use_eaft_loss", "asft_alpha",
     "eaft_alpha", "pref_ftx", "pref_bco_weight", "ld_alpha", "ppo_score_norm", "ppo_whiten_rewards",
     "disable_shuffling", "rope_scaling", "longlora*"):
        "not supported",
    ("reward_model_adapters", "reward_model_quantization_bit"):
        "the reward model must be a folder with all weights: merge adapters with tune merge",
    "reward_model_type": "tune.generation.RewardModel loads a folder with all weights",
    "create_new_adapter": "run tune merge BASE ADAPTER OUT; model.path=OUT without adapter.path starts a new adapter",
    "default_system": "the rows' own system message is used",
    ("add_tokens", "add_special_tokens", "new_special_tokens", "new_special_tokens_config", "init_special_tokens"):
        "add tokens to the base with tune add-tokens",
    ("profiler_*", "profile_modules"): "an edit of a copied recipe: docs/changes.md#a-trace-of-some-steps",
    ("loraplus_lr_embedding", "adapter_folder",
     "virtual_pipeline_model_parallel_size", "optim_config*", "lr_scheduler_config*", "save_epochs", "peft_config*",
     "quant_config*", "dist_config*", "calculate_per_token_loss", "vllm_*", "sglang_*", "export_*", "hf_hub_token",
     "ms_hub_token", "om_hub_token", "module_*", "freeze_*"):
        "no counterpart",
}
# fmt: on

LLAMA_FACTORY = Peer(
    name="LLaMA-Factory",
    looks_like="stage, finetuning_type, cutoff_len, template; or model_class, train_dataset, peft_config",
    marks=marks,
    refused=refused,
    method=method,
    has_adapter=has_adapter,
    has_stages=lambda config: exceeds(config, "pipeline_model_parallel_size", 1),
    has_no_dropout=lambda config, method: method in ("dpo", "kto"),  # disables adapter dropout too
    defaults=defaults,
    faults=faults,
    keys=KEYS | training_arguments.KEYS,
    always=ALWAYS | training_arguments.ALWAYS,
    lacking=LACKING | training_arguments.LACKING,
    read_from={"llamafactory": "0.9.5"},
)
