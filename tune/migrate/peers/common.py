"""Values and keys that several peers share, and their conversion."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tune.migrate.converters import KEEP, Choose, Differs
from tune.migrate.leaves import KeyNames
from tune.migrate.migration import OFF, Convert, Migration

OWN_TEMPLATE = "the checkpoint's own template is used; a base model has none: set tokenizer.chat_template=plain"
ROWS = "the columns of a row determine its format; for other rows set dataset.format=my_data.to_messages"
SUPERVISED_TERM = "an edit of three lines: tests/hacks/edits.md#a-supervised-loss-beside-that-of-preferences"
HELD_OUT = "a hash of each row's content decides whether it is held out"

# The settings of each method, or why it has none. The recipe `sft` becomes full_, lora_ or pipeline_finetune.
METHODS: Mapping[KeyNames, dict[str, Any] | str] = {
    "sft": {"recipe": "sft"},
    ("pt", "pretrain"): {"recipe": "sft", "parts.train_on": "all", "dataset.too_long": "split", "packed": True},
    ("dpo", "sigmoid"): {"recipe": "preference_finetune", "loss._component_": "tune.losses.DPO"},
    "ipo": {"recipe": "preference_finetune", "loss._component_": "tune.losses.IPO"},
    "simpo": {"recipe": "preference_finetune", "loss._component_": "tune.losses.SimPO"},
    "orpo": {"recipe": "preference_finetune", "loss._component_": "tune.losses.ORPO"},
    "cpo": {"recipe": "preference_finetune", "loss._component_": "tune.losses.CPO"},
    "kto": {
        "recipe": "preference_finetune",
        "loss._component_": "tune.losses.KTO",
        "dataset.kind": "labelled",
    },
    ("rm", "reward", "reward_model"): {"recipe": "reward_finetune"},
    "grpo": {"recipe": "grpo", "loss._component_": "tune.losses.ClippedPolicy"},
    "rloo": {"recipe": "grpo", "baseline": "leave_one_out", "loss._component_": "tune.losses.ClippedPolicy"},
    "ppo": {"recipe": "ppo_finetune"},
    ("kd", "gkd", "distillation", "distill"): {"recipe": "distill"},
    ("eval", "evaluate"): {"recipe": "evaluate"},
    "ebft": "trains a model on the features of its own samples; no recipe does that",
    (
        *("rso", "gdpo", "online_dpo", "nash_md", "xpo", "bco", "prm", "gold", "minillm", "papo", "sdft", "sdpo"),
        *("tpo", "a2po", "gmpo", "bco_pair", "hinge", "ddpo"),
    ): "is not supported by any recipe",
}

OPTIMIZERS: Mapping[KeyNames, Any] = {
    ("adamw", "adamw_torch", "adamw_hf", "adamw_torch_fused", "torch.optim.adamw"): "torch.optim.AdamW",
    ("adam", "torch.optim.adam"): "torch.optim.Adam",
    ("paged_adamw", "paged_adamw_32bit", "bitsandbytes.optim.pagedadamw", "bitsandbytes.optim.pagedadamw32bit"): (
        "torch.optim.AdamW",
        "optimizer states are not paged; compute.cpu_offload=true keeps them in host memory",
    ),
    (
        *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit"),
        *("bitsandbytes.optim.adamw8bit", "bitsandbytes.optim.pagedadamw8bit", "torchao*adamw8bit"),
    ): ("torchao.optim.AdamW8bit", "torchao's 8-bit states, not bitsandbytes'; needs the torchao extra"),
    ("adamw_torch_4bit", "ao_adamw_4bit", "torchao*adamw4bit"): (
        "torchao.optim.AdamW4bit",
        "needs the torchao extra",
    ),
    "ao_adamw_fp8": ("torchao.optim.AdamWFp8", "needs the torchao extra"),
    "adafactor": (
        "tune.optimizers.Adafactor",
        "tune (like torch) scales steps by lr x the RMS of a weight, the original by lr alone (scale_parameter=False): "
        "tune needs a learning rate about 50 times as large",
    ),
    "muon": (
        "tune.optimizers.Muon",
        "torch's Muon for matrices of the blocks, AdamW for other parameters; the learning rate may need tuning",
    ),
    ("sgd", "torch.optim.sgd"): "torch.optim.SGD",
    ("rmsprop", "torch.optim.rmsprop"): "torch.optim.RMSprop",
    ("adagrad", "torch.optim.adagrad"): "torch.optim.Adagrad",
    (
        *("lion*", "paged_lion*", "galore*", "q_galore*", "qgalore*", "apollo*", "lomo", "adalomo", "grokadamw"),
        *("schedule_free*", "stable_adamw", "optimi_adamw", "adopt_adamw", "adamc", "came_pytorch", "dion", "sinkgd"),
        *("polora", "flash_*", "ademamix*", "adamw_anyprecision", "rmsprop_*"),
    ): (
        "torch.optim.AdamW",
        "tune does not have this optimizer; AdamW replaces it and may need another learning rate",
    ),
}

SCHEDULERS: Mapping[KeyNames, Any] = {
    ("cosine", "*get_cosine_schedule_with_warmup"): "tune.optimizers.cosine",
    "cosine_with_min_lr": "tune.optimizers.cosine",
    "cosine_warmup_with_min_lr": (
        "tune.optimizers.cosine",
        "the original is one step ahead: it reaches the lowest rate in the last step, tune one step later",
    ),
    "linear": "tune.optimizers.linear",
    ("constant", "constant_with_warmup"): "tune.optimizers.constant",
    "inverse_sqrt": "tune.optimizers.inverse_square_root",
    "warmup_stable_decay": (
        "tune.optimizers.warmup_stable_decay",
        "the original decays along a half cosine from num_decay_steps before the end, tune linearly over the last "
        "fifth: set schedule.decay",
    ),
    (
        *("cosine_with_restarts", "polynomial", "one_cycle", "rex", "log_sweep", "quadratic", "jagged-restart"),
        *("greedy", "reduce_lr_on_plateau"),
    ): ("tune.optimizers.cosine", "tune does not have this schedule; cosine replaces it"),
}

TEMPLATES: Mapping[KeyNames, Any] = {
    ("tokenizer_default*", "jinja", "auto"): KEEP,
    "chatml": "chatml",
    "llama3": "llama3",
    ("gemma", "gemma2", "gemma3"): "gemma",
    ("mistral", "mistral_v1"): "mistral",
    ("default", "alpaca", "plain", "vanilla", "empty"): (
        "plain",
        "not the same plain text as the original's; a base model has no template of its own",
    ),
    "*": (KEEP, OWN_TEMPLATE),
}

# Converters for keys that several peers have.
on_off_checkpointing = Choose("compute.activation_checkpointing", {True: "full", False: "none"})
activation_checkpointing = Choose(
    None,
    {
        True: {"compute.activation_checkpointing": "full"},
        False: {"compute.activation_checkpointing": "none"},
        ("unsloth", "offload*"): {"compute.activation_checkpointing": "full", "compute.activation_offload": True},
    },
)
save_strategy = Choose(
    "checkpointer.every",
    {("steps", "best"): KEEP, ("no", "epoch"): (None, "tune writes one checkpoint, when the run ends")},
)
keep_best = Choose("checkpointer.keep_best", {True: "validation_loss", False: KEEP})
nf4 = Choose(("model.quantization", "quantization"), {True: "nf4", False: KEEP})
float8 = Choose("model.float8", {True: "tensorwise", False: KEEP})
scale_rewards = Differs(
    "advantages are rewards minus the group's mean, not divided by the standard deviation", unless=(False, "none")
)
importance_sampling = Choose("loss._component_", {"token": KEEP, "sequence": "tune.losses.GSPO"})


def edit(section: str) -> Convert:
    """Point to a section of docs/changes.md: an edit of a copied recipe does what the peer has a key for."""

    def convert(run: Migration, key: str, value: Any) -> None:
        if str(value).lower() in OFF:
            run.same("also off in the original", key)
        else:
            run.missing(f"an edit of a copied recipe: {section}", key)

    return convert


rounded_weights = edit("docs/changes.md#weights-rounded-in-training")
random_weights = edit("docs/changes.md#random-initial-weights")
trace = edit("docs/changes.md#a-trace-of-some-steps")


def supervised_term(run: Migration, key: str, value: float) -> None:
    """Point to the edit that adds `value` times the supervised loss of the chosen answers."""
    if value:
        run.missing(f"{SUPERVISED_TERM}, with supervised_weight: {value}", key)
    else:
        run.same("also off in the original", key)


def embedding_noise(run: Migration, key: str, value: float) -> None:
    """Point to the edit that adds NEFTune's noise."""
    if value:
        run.missing(f"an edit of 5 lines: docs/changes.md#noise-on-the-embeddings, with noise_alpha: {value}", key)
    else:
        run.same("also off in the original", key)


def none_if_zero(value: Any) -> Any:
    return None if str(value) in ("0", "0.0") else value


def layout(run: Migration, key: str, value: Any) -> None:
    """Convert a sharding strategy of DeepSpeed or FSDP: `ds_z3_config.json`, `full_shard`, `2`."""
    word = str(value[0] if isinstance(value, list) and len(value) == 1 else value).lower()
    stage = re.search(r"zero[_-]?(\d)", word) or re.search(r"z(\d)(?=_|$|\.json$)", word) or re.fullmatch(r"(\d)", word)
    if "offload" in word:
        run.put(key, True, "compute.cpu_offload", gives_way=True)
    elif (stage and stage[1] in "012") or "shard_grad_op" in word or "no_shard" in word:
        run.differs("parallel.dp_shard=auto also shards the parameters: less memory, same training", key)
    elif "hybrid" in word:
        run.differs("set parallel.dp_replicate=NODES to keep one copy of the model per node", key)
    else:
        run.same("", key)


def model(run: Migration, key: str, value: str) -> None:
    if "teacher" in key:
        target = "teacher.path"
    else:
        target = "reference" if key == "ref_model" else "model.path"
    folder, note = folder_of(value)
    run.put(key, folder, target, note=note)


def reward_model(run: Migration, key: str, value: str, note: str = "") -> None:
    folder, download = folder_of(value)
    judge = {"_component_": "tune.generation.RewardModel", "path": folder}
    run.put(key, judge, "reward", note=note or download)


def folder_of(model: str) -> tuple[str, str]:
    """Return the folder that `tune download` creates for a hub name, and the command. A folder is returned as it is."""
    if model.startswith(("/", ".", "~")) or model.count("/") != 1 or Path(model).is_dir():
        return model, ""
    return f"./{model.split('/')[1]}", f"tune download {model}"


def target_modules(run: Migration, key: str, value: Any) -> None:
    """Convert a list of layers, `a,b`, `all` or a pattern. Two of the peer's keys may each add layers."""
    if isinstance(value, str) and re.fullmatch(r"[\w-]+(\s*,\s*[\w-]+)*", value):
        value = listed(value)
    before = run.part("target_modules", [])
    if value in (["all"], ["all-linear"]):
        value = "all-linear"
    elif isinstance(value, list) and isinstance(before.value, str):
        value = f"{before.value}|.*({'|'.join(value)})"
    elif isinstance(value, list):
        value = [*before.value, *value]
    run.set("parts.target_modules", value, *before.sources, key)


def listed(value: Any) -> Any:
    """Split `a, b` into a list."""
    return re.split(r"\s*,\s*", value) if isinstance(value, str) else value


def ratio_bounds(run: Migration, key: str, value: float) -> None:
    """Use one bound of the ratio for both sides, unless another key sets the upper bound."""
    run.put(key, value, "loss.low")
    run.put(key, value, "loss.high", gives_way=True)
