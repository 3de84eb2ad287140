"""Configs of TRL's scripts (trl sft, dpo, grpo, ...), as YAML or as a command line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tune.migrate.converters import KEEP, Choose, Differs, To
from tune.migrate.leaves import KeyNames, Leaves, exceeds, is_set, show, values_of
from tune.migrate.migration import Convert, Migration, Peer, Setting
from tune.migrate.peers import common, training_arguments

OF_PREFERENCES = ("dpo", "kto", "cpo", "simpo", "orpo")


def marks(config: Leaves) -> list[bool]:
    def has(key: str) -> bool:
        return bool(values_of(config, key, f"*.{key}"))

    has_model = has("model_name_or_path")
    return [
        has("dataset_name"),
        has_model and bool(values_of(config, "dataset*")),
        has("use_peft"),
        has("dataset_train_split") or has("dataset_test_split"),
        has("lora_target_modules") and bool(values_of(config, "*per_device*")),
        has("max_length") or has("max_completion_length"),
        has("num_generations"),
        has_model and has("datasets[].path"),
    ]


def method(config: Leaves) -> tuple[str, str]:
    """Infer the method from the keys. TRL names methods by script, so a file does not state the method."""
    has_teacher = is_set(config, "teacher_model_name_or_path")
    samples = ("num_generations", "max_completion_length", "reward_funcs", "num_iterations")
    if is_set(config, "reward_model_path", "sft_model_path") and not is_set(config, "num_generations"):
        return "ppo", ""
    if is_set(config, *samples) and not has_teacher:
        return "grpo", ""
    if has_teacher:
        is_gkd = is_set(config, "lmbda", "seq_kd")
        return "gkd" if is_gkd else "distillation", "teacher_model_name_or_path"
    if is_set(config, "desirable_weight", "undesirable_weight"):
        return "kto", ""
    if is_set(config, "center_rewards_coefficient"):
        return "reward", "center_rewards_coefficient"
    if is_set(config, "cpo_alpha", "simpo_gamma"):
        return "cpo", ""
    if is_set(config, "beta", "precompute_ref_log_probs", "label_smoothing", "f_divergence_type"):
        return "dpo", ""
    return "sft", ""


def defaults(config: Leaves, method: str) -> Leaves:
    """Return the defaults of SFTConfig and transformers, overridden by those of the method's own class."""
    usual: Leaves = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1.0e-8,
        "max_grad_norm": 1.0,
        "warmup_steps": 0,
        "bf16": True,
        "seed": 42,
        "gradient_checkpointing": True,
        "save_steps": 500,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
    }
    if is_set(config, "load_in_4bit"):
        usual |= {"use_bnb_nested_quant": False}
    if method in (*OF_PREFERENCES, "ipo", "reward", "gkd", "ppo"):
        usual |= {"disable_dropout": True}
    if method == "sft":
        usual |= {"learning_rate": 2.0e-5, "max_length": 1024}
    if method in ("sft", "gkd"):
        usual |= {"truncation_mode": "keep_start"}
    if method in OF_PREFERENCES:
        usual |= {"learning_rate": 1.0e-6, "max_length": 1024, "beta": 0.1}
    if method in ("cpo", "simpo"):
        usual |= {"simpo_gamma": 0.5, "cpo_alpha": 1.0}
    if is_set(config, "use_vllm") and method in ("grpo", "rloo"):
        usual |= {"vllm_importance_sampling_correction": True}
    return usual | OF_METHOD.get(method, {})


OF_SAMPLES: Leaves = {
    "learning_rate": 1.0e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "epsilon": 0.2,
    "temperature": 1.0,
    "beta": 0.0,
    "num_iterations": 1,
}
OF_DISTILLATION: Leaves = {  # always on-policy
    "learning_rate": 1.0e-6,
    "lmbda": 1.0,
    "beta": 1.0,
    "temperature": 1.0,
    "max_completion_length": 512,
}
OF_METHOD: dict[str, Leaves] = {
    "reward": {"learning_rate": 1.0e-4, "max_length": 1024},
    "grpo": OF_SAMPLES | {"scale_rewards": "group"},
    "rloo": OF_SAMPLES | {"num_generations": 2, "beta": 0.05},
    "ppo": {
        "learning_rate": 3.0e-6,
        "num_ppo_epochs": 4,
        "kl_coef": 0.05,
        "vf_coef": 0.1,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "lam": 0.95,
        "response_length": 53,
        "temperature": 0.7,
    },
    "gkd": {
        "learning_rate": 2.0e-5,
        "max_length": 1024,
        "lmbda": 0.5,
        "beta": 0.5,
        "temperature": 0.9,
        "max_new_tokens": 128,
    },
    "distillation": OF_DISTILLATION,
    "distill": OF_DISTILLATION,
}


def faults(config: Leaves, method: str) -> Iterator[tuple[str, str]]:
    if method == "rloo":
        yield (
            "TRL's RLOO computes the ratio per completion and adds the KL divergence to the reward. tune computes the "
            "ratio per token, and kl is a term of the loss",
            "https://github.com/huggingface/trl/blob/main/trl/trainer/rloo_trainer.py",
        )
    if method == "sft" and not is_set(config, "assistant_only_loss", "completion_only_loss"):
        yield (
            "TRL also supervises the user's messages unless assistant_only_loss is true. tune only supervises answers; "
            "dataset.train_on=all supervises all tokens",
            "https://github.com/huggingface/trl/blob/main/trl/trainer/sft_config.py",
        )
    if is_set(config, "packing") and not is_set(config, "packing_strategy", "attn_implementation"):
        yield (
            "packed documents attend to each other without flash attention. In tune, attention stays inside each "
            "document on all hardware",
            "https://github.com/huggingface/trl/issues/1230",
        )
    if config.get("packing_strategy") == "wrapped":
        yield (
            "wrapped packing cuts documents and lets them attend to each other. In tune, rows hold whole documents",
            "https://github.com/huggingface/trl/issues/3067",
        )
    samples = method.startswith(("grpo", "rloo", "ppo", "distil"))
    if not is_set(config, "max_length", "max_seq_length") and not samples:
        yield (
            "rows are cut at max_length=1024 by default, uncounted. In tune, the data table counts the cut rows",
            "https://github.com/huggingface/trl/blob/main/trl/trainer/sft_config.py",
        )
    if not is_set(config, "pad_token", "eos_token") and method in ("sft", "gkd"):
        yield (
            "if pad is EOS, collators that mask the pad id also mask EOS, and the model does not learn to stop. In "
            "tune, labels never depend on the padding token",
            "https://github.com/huggingface/trl/issues/976",
        )
    if is_set(config, "num_generations") and exceeds(config, "gradient_accumulation_steps", 1):
        yield (
            "until June 2026 TRL scaled token-normalized losses wrongly if steps_per_generation differed from "
            "gradient_accumulation_steps. tune divides the loss by the live tokens of the global batch",
            "https://github.com/huggingface/trl/pull/6024",
        )
    yield from training_arguments.faults(config, method)


def reward_model(run: Migration, key: str, value: str) -> None:
    """Set the reward model; PPO's value model also starts from it."""
    common.reward_model(run, key, value)
    if run.recipe == "ppo_finetune":
        run.put(key, common.folder_of(value)[0], "value.path")


def beta(run: Migration, key: str, value: float) -> None:
    """Convert beta: the weight of the KL divergence, or, for GKD, the mix of forward KL (0) and reverse KL (1)."""
    if run.recipe != "distill":
        run.put(key, value, "kl", "loss.beta")
        return
    if value == 0:
        run.set("loss._component_", "tune.losses.ForwardKL", key)
    elif value == 1:
        run.set("loss._component_", "tune.losses.ReverseKL", key)
    else:
        run.set("loss._component_", "tune.losses.JensenShannon", key)
        run.set("loss.beta", value, key)


LOSSES = {
    ("nll", "kto", "orpo"): KEEP,
    "sigmoid": "tune.losses.DPO",
    "ipo": "tune.losses.IPO",
    "simpo": "tune.losses.SimPO",
    "cispo": "tune.losses.PolicyGradient",
    ("grpo", "bnpo", "dr_grpo"): (
        KEEP,
        "the loss is the mean over all tokens of the live groups of a step, as in dapo",
    ),
}
losses = Choose("loss._component_", LOSSES)
losses_of_cpo = Choose("loss._component_", LOSSES | {"sigmoid": "tune.losses.CPO"})


def with_supervised(run: Migration, key: str, words: list[str]) -> None:
    """Convert a loss of preferences to which `sft` is added, and point to the edit with the ratio of their weights."""
    weights = listed(run.theirs.get("loss_weights"))
    by_name = dict(zip(words, weights if len(weights) == 2 else [1.0, 1.0], strict=True))
    supervised = by_name.pop("sft")
    ((name, weight),) = by_name.items()
    loss_type(run, key, name)
    value = f"{supervised / weight:g}" if weight else "the ratio of loss_weights"
    run.missing(f"{common.SUPERVISED_TERM}, with supervised_weight: {value}", key)


def loss_weights(run: Migration, key: str, value: Any) -> None:
    """Point to the report on `loss_type`, which has several losses; a single one has the weight 1."""
    if value in ([1], 1):
        run.same("a single loss has the weight 1", key)
    else:
        run.missing("see loss_type", key)


def loss_type(run: Migration, key: str, value: Any) -> None:
    """Convert the name of a loss, which CPO's trainer (it also has SimPO) reads differently."""
    words = [str(word).lower() for word in (value if isinstance(value, list) else [value])]
    is_cpo = run.method in ("cpo", "simpo")
    if len(words) == len({*words}) == 2 and "sft" in words:
        with_supervised(run, key, words)
    elif len(words) != 1:
        run.missing("write one loss that adds several: docs/changes.md#another-loss-of-preferences", key)
    elif words == ["dapo"]:
        run.same("the mean over all tokens of the live groups of a step", key)
    elif is_cpo and words == ["ipo"]:
        run.missing("tune does not have CPO's squared loss", key)
    elif is_cpo:
        losses_of_cpo(run, key, words[0])
    else:
        losses(run, key, words[0])


def learned(run: Migration, key: str, value: bool) -> None:
    """Set which tokens of a row are supervised: completions, answers, or all."""
    completions, answers = run.theirs.get("completion_only_loss"), run.theirs.get("assistant_only_loss")
    if completions is False and not answers:
        run.set("parts.train_on", "all", key)
    elif completions is None and answers is False:
        note = "for rows with a prompt and a completion, TRL only supervises the completion"
        run.set("parts.train_on", "all", key, note=note)
    else:
        run.same("only answers are supervised", key)


def vllm(run: Migration, key: str, value: Any) -> None:
    """Report what the sampling by vLLM needs here, where it is off unless it is set."""
    here = OF_VLLM.get(key)
    if not run.theirs.get("use_vllm"):
        run.same("vLLM is also off in the original", key)
    elif not run.takes("sampling.memory"):
        run.missing(f"{run.recipe} samples without vLLM", key)
    elif key == "use_vllm":
        path = run.settings.get("model.path", Setting("FOLDER", [])).value
        how = f"sampling._component_=tune.generation.VLLM sampling.path={path}"
        run.differs(f"off unless set: {how} (docs/reinforcement.md#sampling-by-vllm)", key)
    elif here:
        run.differs(f"with sampling._component_=tune.generation.VLLM, set {here}={value}", key)
    elif key == "vllm_mode" and value != "colocate":
        run.differs("there is no server: each training process has an engine", key)
    elif key.startswith("vllm_importance_sampling"):
        run.differs(CORRECTION, key)
    else:
        run.same("each training process has an engine", key)


OF_VLLM = {"vllm_gpu_memory_utilization": "sampling.memory", "vllm_max_model_length": "sampling.max_len"}
CORRECTION = (
    "always on: the ratio of the loss is to the log-probs of the sampler itself. loss.low and loss.high bound it "
    "(PolicyGradient: loss.max_ratio); TRL multiplies by a second ratio"
)


def chat_template_path(run: Migration, key: str, value: str) -> None:
    """Convert a Jinja file; of a model folder, use its own template file. TRL also takes models of the hub."""
    value = str(value)
    folder, download = common.folder_of(value)
    file = Path(folder, "chat_template.jinja")
    if value.endswith((".jinja", ".j2")):
        run.put(key, value, "tokenizer.chat_template")
    elif file.is_file():
        run.put(key, str(file), "tokenizer.chat_template")
    elif download:
        run.missing(f"a template is a Jinja file: tokenizer.chat_template={file}, after {download}", key)
    else:
        run.missing(f"{file} does not exist: write the template to a file, for tokenizer.chat_template", key)


def tokenizing_processes(run: Migration, key: str, value: int) -> None:
    """Set the number of tokenizing processes; prompts need none."""
    if run.takes("dataset.workers"):
        run.put(key, value, "dataset.workers")
    else:
        run.same("each process tokenizes its prompts", key)


def rewards(run: Migration, key: str, value: Any) -> None:
    """Write the setting for the reward functions, whose signature differs."""
    names, weights = (listed(run.theirs.get(name)) for name in ("reward_funcs", "reward_weights"))
    weights += [1.0] * (len(names) - len(weights))
    if key == "reward_weights" and names:
        run.missing("see reward_funcs", key)
        return
    names = names or ["is_right"] * len(weights)
    paths = [name if "." in name else f"my_rewards.{name}" for name in map(str, names)]
    ready = [{"_component_": path, "weight": weight} for path, weight in zip(paths, weights, strict=False)]
    run.missing(
        f"rewrite each as a function (row, completion) -> number (docs/coming_from_trl.md#reward-functions), and set "
        f"reward: {show(ready)}",
        key,
    )


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def temperature(run: Migration, key: str, value: float) -> None:
    """Set the sampling temperature; tune samples students at 1."""
    if run.recipe != "distill":
        run.put(key, value, "sampling.temperature")
    elif value == 1:
        run.same("", key)
    else:
        run.missing("tune samples the student at a temperature of 1", key)


def packing_strategy(run: Migration, key: str, value: str) -> None:
    """Set dataset.too_long=split for the packing strategies that split long rows."""
    if value in ("bfd_split", "bfd-requeue", "wrapped") and run.theirs.get("packing"):
        run.put(key, "split", "dataset.too_long")
    else:
        run.same("rows are not split by packing", key)


def truncation_mode(run: Migration, key: str, value: str) -> None:
    """Set dataset.too_long=truncate for keep_start: the end of long rows and texts is cut."""
    if value != "keep_start":
        run.missing("tune cuts the end of a row, not its beginning", key)
    elif run.takes("dataset.too_long"):
        run.put(key, "truncate", "dataset.too_long", gives_way=True)
    else:
        run.same("the end of a row is cut", key)


KEYS: dict[KeyNames, Convert] = {
    "bnb_4bit_quant_type": Differs("the base is quantized to nf4", unless=("nf4",)),
    "model_revision": Differs("download the revision, and set model.path to its folder", unless=("main",)),
    "tokenizer_name_or_path": To("tokenizer.path", note="a name of the hub: download it, and give the folder"),
    ("model_name_or_path", "model", "teacher_model_name_or_path", "sft_model_path"): common.model,
    ("reward_model_path", "reward_model_name_or_path"): reward_model,
    ("torch_dtype", "dtype"): To("parts.dtype_of_weights"),
    "use_peft": To("recipe"),
    "lora_r": To("adapter.rank"),
    "lora_alpha": To("adapter.alpha"),
    "lora_dropout": To("adapter.dropout"),
    "lora_target_modules": common.target_modules,
    "lora_target_parameters": To("adapter.target_parameters"),
    "lora_modules_to_save": To("adapter.modules_to_save"),
    "use_rslora": To("adapter.rank_stabilized"),
    "use_dora": To("adapter.dora"),
    "load_in_4bit": common.nf4,
    "use_bnb_nested_quant": To("model.double_quantization"),
    "dataset_name": To("parts.data[0].path"),
    "dataset_config": To("parts.data[0].subset"),
    "dataset_train_split": To("parts.data[0].split"),
    "dataset_test_split": To("parts.validation[0].split"),
    ("dataset_streaming", "streaming"): To("dataset.streaming"),
    "dataset_text_field": To("parts.data[0].columns.text", skip=("text",)),
    ("datasets[].path", "dataset_mixture.datasets[].id"): To("parts.data[].path"),
    ("datasets[].name", "dataset_mixture.datasets[].config"): To("parts.data[].subset"),
    ("dataset_mixture.datasets[].split", "datasets[].split"): To("parts.data[].split"),
    "datasets[].data_files": To("parts.data[].data_files"),
    ("dataset_mixture.test_split_size", "test_split_size"): To("dataset.validation_fraction", note=common.HELD_OUT),
    ("max_length", "max_seq_length", "max_seq_len"): To("max_seq_len"),
    "max_prompt_length": To("max_prompt_len"),
    "packing": To("packed"),
    "truncation_mode": truncation_mode,
    "packing_strategy": packing_strategy,
    "eos_token": To("tokenizer.eos_token"),
    "wandb_project": To("parts.trackers.WeightsAndBiases"),
    "chat_template_path": chat_template_path,
    ("dataset_num_proc", "preprocessing_num_workers"): tokenizing_processes,
    ("completion_only_loss", "assistant_only_loss"): learned,
    "activation_offloading": To("compute.activation_offload"),
    "loss_type": loss_type,
    "loss_weights": loss_weights,
    "rpo_alpha": common.supervised_term,
    ("use_vllm", "vllm_*"): vllm,
    ("reward_funcs", "reward_weights"): rewards,
    "beta": beta,
    "label_smoothing": To("loss.label_smoothing"),
    "simpo_gamma": To("parts.gamma"),
    "cpo_alpha": To("parts.nll"),
    "desirable_weight": To("loss.desirable"),
    "undesirable_weight": To("loss.undesirable"),
    "center_rewards_coefficient": To("loss.center"),
    "num_generations": To("group_size"),
    ("max_completion_length", "response_length", "max_new_tokens"): To(
        "sampling.max_new_tokens", "on_policy.max_new_tokens"
    ),
    "top_k": To("sampling.top_k", skip=(0, -1)),
    "temperature": temperature,
    "top_p": To("sampling.top_p", skip=(1,)),
    "min_p": To("sampling.min_p"),
    "num_iterations": To("updates"),
    "epsilon": common.ratio_bounds,
    "epsilon_high": To("loss.high"),
    "mask_truncated_completions": To("mask_truncated"),
    "scale_rewards": common.scale_rewards,
    "steps_per_generation": Differs("samples are drawn for one optimizer step; updates=N reuses them N times"),
    "importance_sampling_level": common.importance_sampling,
    "lmbda": To("on_policy.share"),
    "vf_coef": To("value_weight"),
    "cliprange": common.ratio_bounds,
    "num_mini_batches": Differs("each update uses all completions of the step; updates=N does N updates", unless=(1,)),
    "cliprange_value": To("value_clip"),
    "lam": To("gae_lambda"),
    "num_ppo_epochs": To("updates"),
    "kl_coef": To("kl"),
    "total_episodes": To("max_steps"),
    "kl_estimator": Differs("the log-ratio is subtracted from the reward, as with k1", unless=("k1",)),
}

# fmt: off
ALWAYS: dict[KeyNames, str] = {
    ("trust_remote_code", "attn_implementation", "lora_task_type", "bnb_4bit_compute_dtype",
     "bnb_4bit_quant_storage", "ignore_bias_buffers"):
        "decided by the checkpoint and the hardware",
    ("dataset_mixture.seed", "dataset_mixture.datasets[].columns",
     "dataset_kwargs*", "pad_to_multiple_of", "padding_free", "eval_packing", "shuffle_dataset", "pad_token",
     "datasets[].columns", "padding_value", "is_encoder_decoder", "dataset_batch_size"):
        "rows are tokenized once, packed with document boundaries kept, and padding is never supervised",
    ("precompute_ref_log_probs", "precompute_ref_batch_size", "generate_during_eval",
     "missing_eos_penalty_off"):
        "reference=precomputed",
    ("use_transformers_*", "transformers_*", "cache_implementation", "ds3_gather_for_generation",
     "generation_batch_size", "num_generations_eval", "shuffle_dataset", "log_completions*", "log_multimodal*",
     "log_unique_prompts*", "local_rollout_forward_batch_size", "num_sample_generations", "local_batch_size",
     "mini_batch_size", "local_mini_batch_size", "micro_batch_size", "batch_size", "num_total_batches", "world_size",
     "model_adapter_name", "ref_adapter_name", "num_completions_to_print", "cast_lm_head_to_fp32", "use_liger_loss"):
        "the policy samples in the same process",
    "use_bias_correction_kl": "nothing to set",
    "disable_dropout": "only adapters have dropout; adapter.dropout=0 disables it",
}

LACKING: dict[KeyNames, str] = {
    "ref_model_init_kwargs": "the reference is loaded as the model is",
    ("dataset_mixer*", "dataset_splits", "dataset_configs"):
        "set dataset.path, or dataset.sources of tune.datasets.mix for several datasets",
    ("chat_template", "system_prompt"):
        ("the checkpoint's template and the rows' own system message are used; for your own template set "
         "tokenizer.chat_template=mine.jinja"),
    ("wandb_entity", "wandb_run_group", "callbacks", "benchmarks", "hub_model_revision", "overwrite_hub_revision",
     "push_to_hub_revision"):
        "no counterpart",
    "load_in_8bit": "8-bit bases are not supported: the base stays in 16 bits; model.quantization=nf4 uses 4 bits",
    ("model_init_kwargs*", "teacher_model_init_kwargs*", "teacher_model_revision"): "no counterpart",
    "router_aux_loss_coef": "no auxiliary loss balances the experts",
    ("assistant_only_loss_off", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef",
     "use_weighting", "discopop_tau", "reference_free", "force_use_ref_model", "alpha", "seq_kd"):
        "write your own loss, a class of a few lines: docs/changes.md#another-loss-of-preferences",
    ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"):
        "the reference model never changes; an edit lets it follow: docs/changes.md#a-reference-that-follows",
    ("delta", "sapo_*", "vespo_*", "top_entropy_quantile", "entropy_*", "use_adaptive_entropy",
     "off_policy_mask_threshold", "multi_objective_aggregation", "reward_clip_range", "normalize_advantages",
     "max_tool_calling_iterations", "repetition_penalty", "generation_kwargs*", "chat_template_kwargs*",
     "missing_eos_penalty", "whiten_rewards", "gamma", "stop_token*"):
        "not supported",
    ("dataset_mixture.datasets[].data_dir", "dataset_mixture.datasets[].fraction",
     "dataset_mixture.datasets[].weight", "datasets[].data_dir", "datasets[].fraction", "datasets[].weight"):
        "dataset.take is a number of rows",
}
# fmt: on

TRL = Peer(
    name="TRL",
    looks_like="model_name_or_path, dataset_name",
    marks=marks,
    refused=lambda config: "",
    method=method,
    has_adapter=lambda config: is_set(config, "use_peft"),
    has_no_dropout=lambda config, method: is_set(config, "disable_dropout"),  # disables adapter dropout too
    defaults=defaults,
    faults=faults,
    keys=KEYS | training_arguments.KEYS,
    always=ALWAYS | training_arguments.ALWAYS,
    lacking=LACKING | training_arguments.LACKING,
    nulls={
        ("max_length", "max_seq_length"): (
            "TRL does not cut rows; tune cuts them at max_seq_len: set it to the length of the longest row"
        ),
    },
    read_from={"trl": "1.16.0", "trl_with_ppo": "1.12.0"},  # the second is the last release with PPO
)
