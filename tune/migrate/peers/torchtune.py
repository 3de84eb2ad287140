"""torchtune's configs."""

from collections.abc import Iterator
from typing import Any

from tune.migrate.converters import KEEP, Choose, Differs, To, with_index
from tune.migrate.leaves import KeyNames, Leaves, exceeds, is_set, text_of, values_of
from tune.migrate.migration import Convert, Migration, Peer
from tune.migrate.peers import common


def marks(config: Leaves) -> list[bool]:
    values = text_of(config, "*").splitlines()
    return [
        any(value.startswith("torchtune.") for value in values),
        bool(values_of(config, "checkpointer.checkpoint_dir", "*.checkpointer.checkpoint_dir")),
        "tokenizer._component_" in config and bool(values_of(config, "*checkpointer*")),
        text_of(config, "model._component_").startswith("torchtune"),
        text_of(config, "metric_logger._component_").startswith("torchtune"),
    ]


def refused(config: Leaves) -> str:
    components = text_of(config, *(f"{group}*_component_" for group in ("tokenizer", "model", "dataset")))
    if any(word in components for word in ("vision", "multimodal", "clip", "flamingo")):
        return "model: this model reads images; recipes only train on text"
    has_optimizer = is_set(config, "optimizer*")
    if is_set(config, "prompt*", "max_new_tokens") and not has_optimizer:
        return "prompt: this config generates text. Use tune generate MODEL --prompt TEXT or tune chat MODEL"
    if is_set(config, "quantizer*") and not has_optimizer and not is_set(config, "tasks"):
        return "quantizer: this config quantizes a model. Use tune quantize MODEL --to KIND --out FOLDER"
    return ""


def method(config: Leaves) -> tuple[str, str]:
    """Infer the method from the keys and the loss. A file does not name its recipe."""
    loss = text_of(config, "loss._component_")
    if is_set(config, "ppo_epochs") and is_set(config, "value_checkpointer*", "reward_and_value_model*"):
        return "ppo", "ppo_epochs"
    if is_set(config, "grpo_samples", "inference.group_size"):
        return "grpo", ""
    if is_set(config, "teacher_checkpointer*"):
        return "kd", ""
    for name in ("dpo", "rso", "ipo", "simpo"):
        if name in loss:
            return name, "loss._component_"
    if is_set(config, "tasks") and not is_set(config, "optimizer*"):
        return "evaluate", "tasks"
    return "sft", ""


def has_adapter(config: Leaves) -> bool:
    model = text_of(config, "model._component_")
    return any(word in model for word in (".lora_", ".qlora_", ".dora_"))


def defaults(config: Leaves, method: str) -> Leaves:
    """Return the defaults of torch and torchtune that may differ from tune's."""
    usual: Leaves = {}
    if not is_set(config, "tasks"):
        usual |= {
            "epochs": 1,
            "batch_size": 1,
            "gradient_accumulation_steps": 1,
            "clip_grad_norm": "none",
            "tokenizer.max_seq_len": "none",
            "lr_scheduler._component_": "constant",
            "enable_activation_checkpointing": False,
        }
    name = text_of(config, "optimizer._component_")
    if name:
        usual |= {"optimizer.lr": 1.0e-3, "optimizer.weight_decay": 0.01}
    if "adam" in name:
        usual |= {"optimizer.betas": [0.9, 0.999], "optimizer.eps": 1.0e-8}
    if name.endswith((".sgd", ".adam", ".rmsprop", ".adagrad")):
        usual |= {"optimizer.weight_decay": 0.0}
    if name.endswith((".rmsprop", ".adagrad")):
        usual |= {"optimizer.lr": 0.01}
    if name.endswith(".adagrad"):
        usual |= {"optimizer.eps": 1.0e-10}
    model, loss = text_of(config, "model._component_"), text_of(config, "loss._component_")
    if ".lora_" in model or ".qlora_" in model:
        usual |= {"model.lora_rank": 8, "model.lora_alpha": 16, "model.lora_dropout": 0.0}
    if is_set(config, "teacher_checkpointer*"):
        usual |= {"kd_ratio": 0.5}
    if "simpo" in loss:
        usual |= {"loss.beta": 2.0, "loss.gamma": 0.5}
    if "dpo" in loss:
        usual |= {"loss.beta": 0.1, "loss.label_smoothing": 0.0}
    if "ppoloss" in loss:
        usual |= {"loss.epsilon": 0.1, "loss.value_clip_range": 0.2, "loss.value_coeff": 0.1}
    return usual


def faults(config: Leaves, method: str) -> Iterator[tuple[str, str]]:
    if exceeds(config, "gradient_accumulation_steps", 1) and method in ("sft", "kd"):
        yield (
            "before torchtune 0.4, accumulation averaged the means of micro-batches, which overweights short rows. In "
            "tune, every supervised token of the global batch has the same weight",
            "https://github.com/meta-pytorch/torchtune/pull/1875",
        )
    if ".alpaca" in text_of(config, "dataset._component_"):
        yield (
            "unlike other datasets of torchtune, alpaca_dataset also supervises the prompt (train_on_input=True is its "
            "default). The migrated config keeps this as train_on=all; remove it to supervise only answers",
            "https://github.com/meta-pytorch/torchtune/blob/main/torchtune/datasets/_alpaca.py",
        )


LAYERS = {"output_proj": ["o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"], "output": ["lm_head"]}


def target_modules(run: Migration, key: str, value: Any) -> None:
    """Convert torchtune's names of layers, given as a list or as a switch (`apply_lora_to_mlp`)."""
    if isinstance(value, bool):
        value = [key.rpartition("_")[2]] if value else []
    if isinstance(value, list):
        value = [name for layer in value for name in LAYERS.get(layer, [layer])]
    common.target_modules(run, key, value)


def of_model(run: Migration, key: str, value: str) -> None:
    """Quantize the base of a qlora_ builder. Other names only choose the recipe."""
    run.put(key, True, "recipe")
    if ".qlora_" in value.lower():
        run.put(key, "nf4", "model.quantization", "quantization", gives_way=True)


def max_seq_len(run: Migration, key: str, value: Any) -> None:
    if value == "none":
        run.differs("torchtune has no limit; tune cuts rows longer than max_seq_len and counts them", key)
    else:
        run.put(key, value, "max_seq_len", "max_prompt_len", "max_length")


def prompt_template(run: Migration, key: str, value: Any) -> None:
    run.missing("the chat template renders prompts; for other prompts set dataset.format=my_data.to_messages", key)


def kd_ratio(run: Migration, key: str, value: float) -> None:
    """Convert torchtune's weight of the divergence to tune's weight of the cross-entropy."""
    run.put(key, round(1 - value, 6), "loss.cross_entropy")


# torchtune's dataset builders: where their rows are, and which tokens are supervised.
BUILDERS: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"path": "tatsu-lab/alpaca", "train_on": "all"},
    "alpaca_cleaned_dataset": {"path": "yahma/alpaca-cleaned", "train_on": "all"},
    "grammar_dataset": {"path": "liweili/c4_200m", "columns": {"instruction": "input"}},
    "samsum_dataset": {"path": "Samsung/samsum", "columns": {"instruction": "dialogue", "output": "summary"}},
    "slimorca_dataset": {"path": "Open-Orca/SlimOrca-Dedup"},
    "cnn_dailymail_articles_dataset": {
        "path": "ccdv/cnn_dailymail",
        "subset": "3.0.0",
        "columns": {"text": "article"},
    },
    "wikitext_dataset": {
        "path": "EleutherAI/wikitext_document_level",
        "subset": "wikitext-103-v1",
        "columns": {"text": "page"},
    },
    "hh_rlhf_helpful_dataset": {"path": "RLHFlow/HH-RLHF-Helpful-standard"},
    "stack_exchange_paired_dataset": {
        "path": "lvwerra/stack-exchange-paired",
        "columns": {"instruction": "question", "chosen": "response_j", "rejected": "response_k"},
    },
    "gsm8k_dataset": {"path": "openai/gsm8k", "subset": "main", "columns": {"instruction": "question"}},
}
GENERIC = ("instruct_dataset", "chat_dataset", "text_completion_dataset", "preference_dataset")


def rows(group: str, part: str) -> dict[KeyNames, Convert]:
    """Return converters for the keys of a dataset `group`; its arguments go to `part`."""

    def builder(run: Migration, key: str, value: Any) -> None:
        name = str(value).lower().rpartition(".")[2]
        for argument, ours in BUILDERS.get(name, {}).items():
            run.put(key, ours, with_index(f"{part}.{argument}", key), gives_way=True)
        if name not in BUILDERS and name.endswith(GENERIC):
            run.same("", key)
        elif name not in BUILDERS:
            run.differs(common.ROWS, key)

    def column(run: Migration, key: str, value: Any) -> None:
        name = key.rpartition(".column_map.")[2]
        name = "instruction" if name == "input" else name
        run.put(key, value, with_index(f"{part}.columns.{name}", key))

    return {
        f"{group}._component_": builder,
        f"{group}.source": To(f"{part}.path"),
        (f"{group}.subset", f"{group}.name"): To(f"{part}.subset"),
        f"{group}.split": To(f"{part}.split"),
        f"{group}.data_files": To(f"{part}.data_files"),
        f"{group}.column_map.*": column,
        f"{group}.train_on_input": Choose(f"{part}.train_on", {True: "all", False: "assistant"}),
    }


def one(group: str, part: str) -> dict[KeyNames, Convert]:
    """Return converters for more keys of a dataset that is not in a list."""
    return {
        f"{group}.column": To(f"{part}.columns.text", skip=("text",)),
        f"{group}.conversation_column": To(f"{part}.columns.messages", skip=("messages", "conversations")),
        f"{group}.masking_strategy": Choose(
            f"{part}.train_on", {"train_on_all": "all", "train_on_assistant": "assistant", "train_on_last": "last"}
        ),
    }


def several(group: str) -> dict[KeyNames, Convert]:
    """Return converters for the keys of a list of datasets."""
    return rows(group, "parts.data[]") | {f"{group}.weight": To("parts.data[].weight"), f"{group}.packed": To("packed")}


KEYS: dict[KeyNames, Convert] = {
    "output_dir": To("output_dir"),
    (
        "training.checkpointer.checkpoint_dir",
        "checkpointer.checkpoint_dir",
        "teacher_checkpointer.checkpoint_dir",
    ): common.model,
    "value_checkpointer.checkpoint_dir": To(
        "value.path", note="either a reward model of reward_finetune, or a language model with a new value head"
    ),
    "model._component_": of_model,
    ("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output"): target_modules,
    "model.lora_rank": To("adapter.rank"),
    "model.lora_alpha": To("adapter.alpha"),
    "model.lora_dropout": To("adapter.dropout"),
    "model.use_dora": To("adapter.dora"),
    "model.quantize_base": common.nf4,
    "tokenizer._component_": Choose(
        ("tokenizer.chat_template", "chat_template"),
        {
            "*llama3_tokenizer": "llama3",
            "*qwen*_tokenizer": "chatml",
            "*mistral_tokenizer": "mistral",
            "*": (KEEP, common.OWN_TEMPLATE),
        },
    ),
    "tokenizer.max_seq_len": max_seq_len,
    ("tokenizer.prompt_template", "tokenizer.prompt_template.*"): prompt_template,
    ("dataset.packed", "dataloader.packed"): To("packed"),
    **rows("dataset", "parts.data[0]"),
    **one("dataset", "parts.data[0]"),
    **rows("dataset_val", "parts.validation[0]"),
    **one("dataset_val", "parts.validation[0]"),
    **several("dataset[]"),
    **several("datasets[]"),
    ("batch_size", "training.batch_size"): To("prompts_per_step", "batch_size", "parts.micro_batch_size"),
    "gradient_accumulation_steps": To("parts.accumulation"),
    "forward_batch_size": To("micro_batch_size"),
    ("grpo_samples", "inference.group_size"): To("group_size"),
    ("inference.max_generated_tokens", "max_generated_tokens"): To("sampling.max_new_tokens"),
    ("inference.temperature", "temperature"): To("sampling.temperature"),
    ("inference.top_k", "top_k"): To("sampling.top_k"),
    ("training.ppo_epochs", "ppo_epochs"): To("updates"),
    "reward_checkpointer.checkpoint_dir": common.reward_model,
    ("training.loss.kl_coeff", "loss.kl_coeff", "kl_coeff"): To("kl"),
    ("training.loss.epsilon", "loss.epsilon"): common.ratio_bounds,
    "loss.value_clip_range": To("value_clip"),
    "loss.value_coeff": To("value_weight"),
    "lmbda": To("gae_lambda"),
    ("num_steps", "orchestration.num_steps"): To("max_steps"),
    "epochs": To("epochs"),
    "max_steps_per_epoch": To("max_steps", note="torchtune counts steps per epoch, tune counts steps of the run"),
    ("training.optimizer._component_", "optimizer._component_"): Choose("optimizer._component_", common.OPTIMIZERS),
    ("optimizer.lr", "training.optimizer.lr"): To("optimizer.lr"),
    ("optimizer.eps", "training.optimizer.eps"): To("optimizer.eps"),
    ("optimizer.weight_decay", "training.optimizer.weight_decay"): To("optimizer.weight_decay"),
    ("optimizer.fused", "training.optimizer.fused"): To("optimizer.fused"),
    "optimizer.betas": To("optimizer.betas"),
    ("training.clip_grad_norm", "clip_grad_norm"): To(
        "max_grad_norm", value=lambda norm: None if norm == "none" else norm
    ),
    "lr_scheduler._component_": Choose("schedule._component_", common.SCHEDULERS),
    "lr_scheduler.num_warmup_steps": To("parts.warmup_steps"),
    ("loss._component_", "training.loss._component_"): Choose(
        "loss._component_",
        {
            ("*crossentropy*", "*cewith*", "*grpo*", "*ppoloss"): KEEP,
            "*dpoloss": "tune.losses.DPO",
            "*ipoloss": "tune.losses.IPO",
            "*simpoloss": "tune.losses.SimPO",
        },
    ),
    "loss.beta": To("loss.beta"),
    "loss.label_smoothing": To("loss.label_smoothing"),
    "loss.tau": To("loss.beta"),
    "loss.gamma": To("loss.gamma"),
    "kd_ratio": kd_ratio,
    "kd_loss._component_": Choose(
        "loss._component_",
        {
            "*.forwardkl*": "tune.losses.ForwardKL",
            "*.reversekl*": "tune.losses.ReverseKL",
            "*symmetrickl*": (
                "tune.losses.JensenShannon",
                "the divergences from the mean of both models; torchtune sums the forward and reverse KL",
            ),
        },
    ),
    "dtype": To("parts.dtype_of_weights"),
    "device": To("device", skip=("cuda",)),
    ("seed", "training.seed"): To("seed"),
    ("compile.model", "compile", "training.compile"): To("compute.compile"),
    "enable_async_checkpointing": To("checkpointer.async"),
    ("training.enable_activation_checkpointing", "enable_activation_checkpointing"): common.on_off_checkpointing,
    "ac_mode": Choose("compute.activation_checkpointing", {"full": "full", "selective": "selective", "none": "none"}),
    ("training.enable_activation_offloading", "enable_activation_offloading"): To("compute.activation_offload"),
    ("fsdp_cpu_offload", "fsdp.cpu_offload"): To("compute.cpu_offload"),
    "tensor_parallel_dim": To("parallel.tp"),
    "context_parallel_dim": To("parallel.cp"),
    "data_parallel_replicate_dim": To("parallel.dp_replicate"),
    "data_parallel_shard_dim": To("parallel.dp_shard", skip=(-1,)),
    "run_val_every_n_steps": To("evaluate.every"),
    ("save_every_n_steps", "training.save_every_n_steps"): To("checkpointer.every"),
    "log_every_n_steps": To("parts.console_every"),
    "metric_logger._component_": Choose(
        None,
        {
            "*wandb*": {"parts.trackers.WeightsAndBiases": "torchtune"},
            "*tensorboard*": {"parts.trackers.TensorBoard": True},
            ("*disk*", "*stdout*"): KEEP,
            "*": (KEEP, "use wandb, tensorboard or another of trackers"),
        },
    ),
    "metric_logger.project": To("parts.trackers.WeightsAndBiases"),
    "metric_logger.name": To("parts.run_name"),
    "profiler.enabled": common.trace,
    "enable_fp8_training": common.float8,
    "fp8_recipe_name": Differs("with enable_fp8_training, set model.float8 to this name", unless=("tensorwise",)),
    "quantizer._component_": common.rounded_weights,
    "tasks": To("tasks"),
    "limit": To("limit"),
    "max_seq_length": To("max_length", "max_seq_len"),
}

# fmt: off
ALWAYS: dict[KeyNames, str] = {
    ("model.*", "policy_model.*", "reward_and_value_model.*", "teacher_model.*", "inference.model",
     "*checkpointer._component_", "*checkpointer.checkpoint_files*", "*checkpointer.model_type",
     "*checkpointer.recipe_checkpoint", "*checkpointer.output_dir", "*checkpointer.adapter_checkpoint",
     "*checkpointer.safe_serialization", "training.checkpointer.*", "training.ref_checkpointer.*",
     "postprocessing.checkpointer.*", "postprocessing.ref_checkpointer.*"):
        "read from the checkpoint's folder (config.json and file names); for Meta's own format use tune convert",
    ("ref_checkpointer.checkpoint_dir", "ref_policy_checkpointer.checkpoint_dir"):
        "the reference starts at model.path (reference=...)",
    "tokenizer.*": "read from the checkpoint's tokenizer files",
    ("shuffle", "collate_fn", "dataloader.*", "dataset.shuffle", "dataset.seed", "dataset_val.*", "batch_size_val"):
        "rows are shuffled by the seed, and packed or padded, without a setting",
    "resume_from_checkpoint": "resume=auto continues the run in output_dir",
    ("custom_sharded_layers", "fsdp_reshard_after_forward", "memory_efficient_fsdp_wrap", "fsdp_sharding_strategy",
     "tensor_parallel_plan*", "ac_option", "low_cpu_ram", "use_loss_parallel_ctx_manager", "use_loss_parallel",
     "data_parallel_*"):
        "parallel.dp_shard=auto shards each block (FSDP2); the model determines the tensor-parallel plan",
    ("training.loss.num_output_chunks", "training.loss.ignore_index", "training.loss.mask_pre_projection",
     "training.loss.enable_*", "loss.num_output_chunks", "loss.ignore_index", "loss.mask_pre_projection",
     "loss.enable_*", "kd_loss.num_output_chunks", "kd_loss.ignore_index"):
        "the loss is computed in chunks of tokens",
    ("metric_logger.log_dir", "log_level", "log_peak_memory_stats", "debug_*", "metric_logger.*"):
        "see metrics.jsonl and log.txt in the run folder",
    ("profiler.*", "_profiler*"): "read where profiler.enabled is",
    ("compile.loss", "compile.optimizer_step", "compile.scale_grads", "dataset.conversation_style", "enable_kv_cache",
     "chat_format", "apply_chat_template", "save_adapter_weights_only", "save_last_epoch_only", "epochs_to_save",
     "num_warmup_*", "cudnn_deterministic_mode", "activation_offloading_*", "optimizer_in_bwd_*",
     "enable_fp8_training_off", "save_every_n_epochs", "dataset_val"):
        "nothing to set",
}

LACKING: dict[KeyNames, str] = {
    "dataset.filter_fn": "set dataset.filter to a function that says whether to keep a row",
    "optimizer_in_bwd": "edit a copied recipe: 'Update each parameter in the backward' in docs/changes.md",
    "kd_loss.sym_kd_ratio":
        "the Jensen-Shannon divergence replaces the sum of two divergences; its loss.beta is not their ratio",
    ("quantizer*", "fake_quant_after_n_steps"):
        ("docs/changes.md#weights-rounded-in-training rounds weights from the first step on, in the groups of tune "
         "quantize"),
    ("inference.*", "orchestration.*", "postprocessing.*", "training.*"):
        "sampling and training alternate in the same processes",
    "reward_functions[]*": "write a reward function (row, completion) -> number and set reward=my_rewards.is_right",
    ("stop_token_ids", "penalise_no_eos"):
        ("an answer ends at the tokenizer's end-of-turn tokens and at sampling.stop_strings; to penalize answers "
         "that do not end, write a reward function"),
    ("ppo_batch_size", "gamma", "whiten_rewards", "min_response_length", "reward_penalty",
     "num_generations"):
        "not supported",
    ("dataset.partition", "dataset.new_system_prompt", "dataset.message_transform*", "dataset.transform*",
     "dataset.prompt_template", "dataset.add_eos", "dataset.max_seq_len", "dataset.cross_document_attention",
     "dataset.image_*", "datasets[]*", "dataset[]*", "dataset.*"):
        "write your own functions and name them in dataset.filter and dataset.format",
    "lr_scheduler.*": "schedules only have warmup and min_ratio",
    "optimizer.*": "set each as optimizer.NAME",
}
# fmt: on

TORCHTUNE = Peer(
    name="torchtune",
    looks_like="_component_ of torchtune, checkpointer.checkpoint_dir",
    marks=marks,
    refused=refused,
    method=method,
    has_adapter=has_adapter,
    defaults=defaults,
    faults=faults,
    keys=KEYS,
    always=ALWAYS,
    lacking=LACKING,
    read_from={"torchtune": "0.6.1", "torch": "2.13.0", "bitsandbytes": "0.48.2"},
)
