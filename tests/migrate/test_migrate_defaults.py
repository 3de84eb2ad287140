"""Spelling out a peer's default in a config changes nothing: `tune migrate` assumes the peer's defaults.

The defaults come from the peers' own source (`read_peer_defaults.py`).
"""

import re
from pathlib import Path

import pytest
import yaml
from helpers import slow_but, weekly_but
from omegaconf import OmegaConf

from tune import config
from tune.cli import migrate as verb
from tune.config.check import combine, signature_of
from tune.config.text import Layer
from tune.migrate import PEERS, leaves, migrate
from tune.migrate.leaves import NOTHING
from tune.migrate.migration import OFF, each_name

PEER_DEFAULTS = yaml.safe_load(Path(__file__).with_name("peer_defaults.yaml").read_text())
DEFAULTS = {name: config.read_file(config.find_config(name)) for name in config.list_recipes_with_settings()}
RECIPES = {name: dict(leaves(values)) for name, values in DEFAULTS.items()}
TRAINING_ARGUMENTS = PEER_DEFAULTS["transformers"]["TrainingArguments"]
TRL = {
    method: PEER_DEFAULTS["trl"]["shared"]["defaults"] | own["defaults"]
    for method, own in PEER_DEFAULTS["trl"].items()
    if method not in ("shared", "read_from")
}
LLAMA_FACTORY = {form: PEER_DEFAULTS["llama_factory"][form]["defaults"] for form in ("hparams", "v1/config")}
LLAMA_FACTORY["hparams"] = TRAINING_ARGUMENTS["defaults"] | LLAMA_FACTORY["hparams"]
# None leaves the choice to transformers or TRL; the warmup default is the peer's own.
AXOLOTL = PEER_DEFAULTS["axolotl"]["config"]["defaults"]
AXOLOTL = AXOLOTL | {
    key: value
    for key, value in TRAINING_ARGUMENTS["defaults"].items()
    if key in AXOLOTL and AXOLOTL[key] is None and key != "warmup_steps"
}
COMPONENTS = PEER_DEFAULTS["torchtune"]["components"]
GROUPS = {  # torchtune: the part of the config that names such a component
    r"torch\.optim|bitsandbytes": ["optimizer"],
    r".*\.(rlhf|modules)\.loss": ["loss", "kd_loss"],
    r"torchtune\.datasets": ["dataset", "dataset_val", "dataset[]", "datasets[]"],
    r"torchtune\.models\..*lora": ["model"],
    r".*_tokenizer": ["tokenizer"],
    r".*profiler": ["profiler"],
    r".*Logger": ["metric_logger"],
    r".*get_cosine": ["lr_scheduler"],
}
SHOWN = {  # our settings that do not change training results
    "output_dir",  # the location of the output
    "trackers",  # the printed steps; the log has all
    "evaluate.max_new_tokens",  # the length of displayed answers
    "checkpointer.async",  # when checkpoints are written
    "optimizer.fused",  # another kernel for the same update
}
# Users decide which message tokens to train on: the report says so, which a test below checks.
TO_DECIDE = {"assistant_only_loss"}


def groups_of(component):
    return next(groups for pattern, groups in GROUPS.items() if re.match(pattern, component))


def with_key(values, key, value):
    """Return the config with `group.key` or `group[].key` added; a list has one item."""
    first, _, rest = key.partition(".")
    name = first.removesuffix("[]")
    if not rest:
        return values | {first: value}
    if name == first:
        return values | {name: with_key(values.get(name) or {}, rest, value)}
    return values | {name: [with_key((values.get(name) or [{}])[0], rest, value)]}


def settings(run):
    return run.recipe, {key: change.value for key, change in run.changed().items()}


def ours(run):
    """Return the resulting settings, with the defaults of the components that they name."""
    verb.check(run)
    layers = [Layer(DEFAULTS[run.recipe]), Layer(verb.nested(run.changed()))]
    resolved = dict(leaves(OmegaConf.to_container(combine(layers)[0])))
    for key in [key for key in resolved if key.endswith("._component_")]:
        for name, parameter in signature_of(str(resolved[key])).parameters.items():
            if parameter.default is not parameter.empty:
                resolved.setdefault(f"{key.removesuffix('_component_')}{name}", parameter.default)
    return {key: value for key, value in resolved.items() if key.partition("[")[0] not in SHOWN}


def differences(base, defaults, peer, method):
    """Return, by key, how the settings of the config alone differ from those with the key at its default."""
    alone, changed = migrate(base, peer, method, RECIPES), {}
    given_keys, of_alone, before = [key for key, _ in leaves(base)], settings(alone), ours(alone)
    for key, value in defaults.items():
        is_given = any(f"{key.replace('[]', '[0]')}.".startswith(f"{prefix}.") for prefix in given_keys)
        if is_given or key in TO_DECIDE or PEERS[peer].look_up(key)[0] != "keys":
            continue
        run = migrate(with_key(base, key, value), peer, method, RECIPES)
        if settings(run) != of_alone and (after := ours(run)) != before:
            changed[key] = [
                {name: side.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
                for side in (before, after)
            ]
    return changed


QUICK = [("sft", True), *((method, False) for method in ("cpo", "gkd", "grpo", "ppo"))]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "has_adapter"), slow_but(QUICK, [*QUICK[:1], *((name, False) for name in TRL)]))
def test_explicit_defaults_of_trl_change_nothing(method, has_adapter):
    base = {"model_name_or_path": "a/b", "dataset_name": "c/d", "use_peft": has_adapter, "load_in_4bit": has_adapter}
    base |= {"teacher_model_name_or_path": "a/c"} if method in ("gkd", "distillation") else {}
    base |= {"sft_model_path": "a/s", "reward_model_path": "a/r"} if method == "ppo" else {}
    assert differences(base, TRL[method], "trl", method) == {}


@pytest.mark.slow
@pytest.mark.parametrize("stage", slow_but(["dpo", "ppo"], ["sft", "dpo", "kto", "rm", "ppo", "pt"]))
def test_explicit_defaults_of_llama_factory_change_nothing(stage):
    base = {"model_name_or_path": "a/b", "dataset": "c", "stage": stage, "template": "qwen", "do_train": True}
    base |= {"reward_model": "r/m"} if stage == "ppo" else {}
    base |= {"quantization_bit": 4} if stage == "sft" else {}
    assert differences(base, LLAMA_FACTORY["hparams"], "llama_factory", None) == {}


@pytest.mark.slow
@pytest.mark.parametrize("pref_loss", slow_but(["simpo"], ["simpo", "ipo", "orpo"]))
def test_explicit_defaults_of_llama_factory_losses_change_nothing(pref_loss):
    base = {"model_name_or_path": "a/b", "dataset": "c", "stage": "dpo", "template": "qwen", "pref_loss": pref_loss}
    assert differences(base, LLAMA_FACTORY["hparams"], "llama_factory", None) == {}


@pytest.mark.slow
@pytest.mark.parametrize("peft_config", [{}, {"name": "lora"}])
def test_explicit_defaults_of_the_second_llama_factory_form_change_nothing(peft_config):
    base = {"model": "a/b", "train_dataset": "c/d", "template": "qwen", "peft_config": peft_config}
    assert differences(base, LLAMA_FACTORY["v1/config"], "llama_factory", None) == {}


OF_AXOLOTL = {
    "dpo": {"rl": "dpo"},
    "kto": {"rl": "kto"},
    "orpo": {"rl": "orpo"},
    "simpo": {"rl": "simpo"},
    "ipo": {"rl": "ipo"},
    "grpo": {"rl": "grpo"},
    "sft": {"adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True},
    "qat": {"qat": {"activation_dtype": "int8"}},
    "pretrain": {"pretraining_dataset": [{"path": "e/f"}], "datasets": None, "max_steps": 10},
}


@pytest.mark.weekly
@pytest.mark.parametrize("form", weekly_but(["sft", "grpo"], OF_AXOLOTL))
def test_explicit_defaults_of_axolotl_change_nothing(form):
    """Defaults that its schema leaves open come from TRL."""
    base = {"base_model": "a/b", "datasets": [{"path": "c/d", "type": "chat_template"}], "learning_rate": 1e-4}
    base |= OF_AXOLOTL[form]
    of_grpo = {f"trl.{key}": value for key, value in TRL["grpo"].items() if form == "grpo"}
    groups = {*base, "datasets[]", "trl"} if form != "pretrain" else {*base, "pretraining_dataset[]"}
    own = {
        key: value
        for key, value in AXOLOTL.items()
        if of_grpo.get(key) is None and ("." not in key or key.partition(".")[0] in groups)
    }
    defaults = of_grpo | own
    assert differences(base, defaults, "axolotl", None) == {}


def torchtune_config(component):
    """Return a torchtune config that names this component and its requirements."""
    group = groups_of(component)[0]
    group = "kd_loss" if "KL" in component else group
    values = {
        "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
        "checkpointer": {"checkpoint_dir": "/m"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    }
    if group == "kd_loss":
        values["teacher_checkpointer"] = {"checkpoint_dir": "/t"}
    if "PPOLoss" in component:
        values |= {"ppo_epochs": 2, "value_checkpointer": {"checkpoint_dir": "/v"}}
    if component.endswith(("hh_rlhf_helpful_dataset", "preference_dataset", "paired_dataset")):
        values["loss"] = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
    if group == "optimizer":
        del values["optimizer"]["lr"]
    required = dict.fromkeys(COMPONENTS[component]["required"], 10 if group == "lr_scheduler" else "x")
    return values | {group: values.get(group, {}) | {"_component_": component} | required}, group


@pytest.mark.parametrize("component", [name for name in COMPONENTS if "RSO" not in name])
def test_explicit_defaults_of_torchtune_components_change_nothing(component):
    base, group = torchtune_config(component)
    defaults = {f"{group}.{key}": value for key, value in COMPONENTS[component]["defaults"].items()}
    assert differences(base, defaults, "torchtune", None) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "component", ["torch.optim.AdamW", "torchtune.modules.loss.ForwardKLLoss", "torchtune.rlhf.loss.PPOLoss"]
)
def test_explicit_defaults_of_torchtune_recipes_change_nothing(component):
    base, _ = torchtune_config(component)
    assert differences(base, PEER_DEFAULTS["torchtune"]["recipes"]["defaults"], "torchtune", None) == {}


def keys_of(part):
    return {*part["defaults"], *part["required"]}


def known_keys(peer):
    """Return the keys in the peer's source, with a default or required."""
    own = PEER_DEFAULTS[peer]
    keys = {key for name, part in own.items() if name not in ("read_from", "components") for key in keys_of(part)}
    if peer != "torchtune":
        return keys | keys_of(TRAINING_ARGUMENTS)
    named = {
        f"{group}.{key}"
        for component in COMPONENTS
        for group in groups_of(component)
        for key in keys_of(COMPONENTS[component])
    }
    return keys | named


NAMED = "named by each config"
LATER = "of recipes after the release"
OLDER = "of older releases"
NESTED = "of a part that a config gives as a whole"
CALLBACK = "of a callback"
LAUNCHED = "of accelerate launch, which asks for all of its config"
WITHOUT_DEFAULT = {  # the keys, and why the release has no default
    "torchtune": {
        r".*\._component_|(training\.)?(value_|reward_|teacher_)?checkpointer\.checkpoint_dir": NAMED,
        r"dataset(_val)?\.(name|subset|data_files|column_map\..*)": "arguments of datasets.load_dataset, and columns",
        r"datasets?\[\]\.(name|subset|data_files|column_map\..*)": "the same",
        r"(training|inference|orchestration|fsdp|dataloader)\..*|compile\.model|datasets?\[\]\.weight": LATER,
        r"context_parallel_dim|data_parallel_\w+_dim|(run_val|save)_every_n_steps": LATER,
        r"dataset(_val)?\.masking_strategy|enable_fp8_training|fp8_recipe_name": LATER,
        r"loss\.tau": OLDER,
        r"tokenizer\.prompt_template\.\*": NESTED,
        r"loss\.kl_coeff": "of GRPO's loss, in recipes that are no part of the release",
        r"metric_logger\.name": "an argument of wandb.init",
    },
    "axolotl": {
        r"datasets\[\]\.message_property_mappings\.\*": NESTED,
        r"bnb_config_kwargs\..*": "True where the model is loaded in 4 bits (loaders/model.py)",
        r"test_datasets\[\]\..*|lr_scheduler_kwargs\..*|fsdp_config\.\w+|expert_parallel_size": NESTED,
        r"datasets\[\]\.(text_column|type\.field_human)|adam_eps|eta_min": OLDER,
    },
    "llama_factory": {
        r"(peft|quant|dist|optim|lr_scheduler|fsdp)_config\..*|deepspeed\..*|lr_scheduler_kwargs\..*": NESTED,
        r"(cp|ep|tp|context_parallel|expert_model_parallel|(tensor|pipeline)_model_parallel)_size": "1, of Megatron",
        r"per_gpu_train_batch_size|warmup_ratio|no_cuda": OLDER,
        r"early_stopping_(patience|steps)": CALLBACK,
        r"accelerate\..*": LAUNCHED,
    },
    "trl": {
        r"(dataset_mixture|fsdp_config|deepspeed|lr_scheduler_kwargs)\..*": NESTED,
        r"tokenizer_name_or_path": OLDER,
        r"vllm_\*": "read where use_vllm is",
        r"reward_funcs": "of the script trl grpo",
        r"model|torch_dtype|max_(seq_length|seq_len|prompt_length)|wandb_project|overwrite_output_dir": OLDER,
        r"preprocessing_num_workers|rpo_alpha": OLDER,
        r"per_gpu_train_batch_size|warmup_ratio|no_cuda": OLDER,
        r"early_stopping_(patience|steps)": CALLBACK,
        r"accelerate\..*": LAUNCHED,
    },
}


@pytest.mark.parametrize("peer", PEERS)
def test_every_key_has_a_peer_default_or_a_reason_why_not(peer):
    known = known_keys(peer)
    keys = {*each_name(PEERS[peer].keys)}
    reasons = {key: [pattern for pattern in WITHOUT_DEFAULT[peer] if re.fullmatch(pattern, key)] for key in keys}
    assert [key for key in sorted(keys - known) if not reasons[key]] == []
    assert {*WITHOUT_DEFAULT[peer]} == {pattern for key in keys - known for pattern in reasons[key]}


WITH_ANOTHER = "read where another key asks for it"
NEUTRAL = "this value changes nothing"
LOST = {  # defaults of keys without a counterpart, and why nothing is lost
    r"(trl\.)?ref_model_.*|(entropy|sapo|vespo|apollo|badam|q?galore|dion|eaft|asft|lisa|relora)_.*": WITH_ANOTHER,
    r"(freeze_trainable|oft|export|vllm|sglang|swanlab|profiler|generation|otel|video|audio|fp8)_.*": WITH_ANOTHER,
    r"discopop_tau|f_alpha_divergence_coef|loraplus_lr_embedding|init_special_tokens|hub_strategy": WITH_ANOTHER,
    r"peft_config\.(freeze|cast)_.*|trl\.(reroll|reward_num)_.*|num_generation_samples": WITH_ANOTHER,
    r"project|metric_logger\.\w+": "of another logger",
    r"f_divergence_type": "the divergence of DPO",
    r"repetition_penalty|gamma|top_entropy_quantile|trl\.skip_zero_advantage_batches": NEUTRAL,
    r"multi_objective_aggregation": "of several rewards the sum is taken",
    r"qat\.group_size": "said where qat.weight_dtype is",
    r"reward_model_type": "said where reward_model is (test_methods)",
    r"dataset\.(add_eos|split_across_pack)": "texts end with EOS here too, and pieces go on in the next row",
    r"lr_scheduler\.(num_cycles|last_epoch)": "half a cosine, from its beginning",
    r"optimizer\.(block_wise|min_8bit_size|optim_bits|percentile_clipping|alpha)": "as theirs",
}


@pytest.mark.slow
def test_no_default_without_a_counterpart_is_lost_silently():
    defaults = [("trl", values) for values in TRL.values()]
    defaults += [("llama_factory", values) for values in LLAMA_FACTORY.values()] + [("axolotl", AXOLOTL)]
    defaults += [
        ("torchtune", {f"{groups_of(name)[0]}.{key}": value for key, value in component["defaults"].items()})
        for name, component in COMPONENTS.items()
    ]
    lost = {
        key
        for peer, values in defaults
        for key, value in values.items()
        if PEERS[peer].look_up(key)[0] == "lacking" and value not in NOTHING and str(value).lower() not in OFF
    }
    assert [key for key in sorted(lost) if not any(re.fullmatch(pattern, key) for pattern in LOST)] == []
    assert [pattern for pattern in LOST if not any(re.fullmatch(pattern, key) for key in lost)] == []


def test_default_training_tokens_are_reported_when_the_file_is_silent():
    base = {"model_name_or_path": "a/b", "dataset_name": "c/d"}
    silent, explicit = (migrate(base | extra, "trl", "sft", RECIPES) for extra in ({}, {"assistant_only_loss": False}))
    assert ours(explicit)["dataset.train_on"] == "all" and any(
        "assistant_only_loss" in fault for fault in silent.faults()
    )


def test_tables_name_the_releases_of_their_defaults():
    for name, peer in PEERS.items():
        assert PEER_DEFAULTS[name]["read_from"].items() <= peer.read_from.items()


# Names of keys whose value decides tokens, labels, rows or weights.
DECISIVE = (
    r".*(template|thinking|tokenizer_config|tokenizer_name|split_special|add_tokens|bos_token|additional_special|eot).*",
    r"datasets\[\]\.(field|message|roles|shards|type|input|conversation|revision|split|skip|chat).*|test_datasets.*",
    r".*(overrides|model_config|rope|resize_|revision|init_kwargs|quant_type|quantization_type|filter_fn|\.bias).*",
    r".*(ignore_pad|tokenized_path|untrained|init_config|shuffle_merged|eval_sequence).*",
)
NOT_DECISIVE = {  # keys that only look like one, and why
    r"model\.\*|training\..*|postprocessing\..*": "the folder of the checkpoint decides",
    r"tokenizer\.\*|apply_chat_template": "the folder's tokenizer decides",
    r".*_kwargs\*|cls_model_config|apply_rope_fusion": "of the computation",
    r"hub_revision": "of the upload",
}


@pytest.mark.parametrize("peer", PEERS)
def test_keys_that_decide_what_is_learned_always_need_a_conversion(peer):
    names = [name for name in each_name(PEERS[peer].always) if any(re.fullmatch(word, name) for word in DECISIVE)]
    assert [name for name in names if not any(re.fullmatch(reason, name) for reason in NOT_DECISIVE)] == []


QUIETLY = [
    ("axolotl", "tokenizer_config", "other/tokenizer"),
    ("axolotl", "overrides_of_model_config.rope_scaling", {"type": "linear", "factor": 4.0}),
    ("axolotl", "special_tokens.additional_special_tokens", ["<|tool|>"]),
    ("axolotl", "special_tokens.bos_token", "<|im_start|>"),
    ("axolotl", "datasets[].chat_template", "llama3"),
    ("axolotl", "datasets[].shards", 10),
    ("axolotl", "datasets[].field_tools", "functions"),
    ("axolotl", "datasets[].split_thinking", True),
    ("axolotl", "datasets[].revision", "abc123"),
    ("axolotl", "datasets[].message_field_training", "learned"),
    ("axolotl", "datasets[].message_property_mappings.content", "said"),
    ("axolotl", "datasets[].roles_to_train", []),
    ("axolotl", "eval_sequence_len", 4096),
    ("axolotl", "shuffle_merged_datasets", False),
    ("llama_factory", "enable_thinking", False),
    ("llama_factory", "split_special_tokens", True),
    ("llama_factory", "resize_vocab", True),
    ("llama_factory", "ignore_pad_token_for_loss", False),
    ("llama_factory", "tokenized_path", "saves/tok"),
    ("llama_factory", "model_revision", "abc"),
    ("llama_factory", "quantization_type", "fp4"),
    ("trl", "bnb_4bit_quant_type", "fp4"),
    ("trl", "model_revision", "abc"),
    ("torchtune", "dataset.filter_fn", "mine.wanted"),
]
SMALLEST = {
    "axolotl": {"base_model": "a/b", "datasets": [{"path": "c/d", "type": "chat_template"}]},
    "llama_factory": {"model_name_or_path": "a/b", "dataset": "c", "stage": "sft", "template": "qwen"},
    "trl": {"model_name_or_path": "a/b", "dataset_name": "c/d"},
}


@pytest.mark.parametrize(("peer", "key", "value"), QUIETLY)
def test_values_that_change_what_is_learned_are_never_the_same_by_default(peer, key, value):
    base = SMALLEST.get(peer) or torchtune_config("torch.optim.AdamW")[0]
    run = migrate(with_key(base, key, value), peer, "sft" if peer == "trl" else None, RECIPES)
    (entry,) = [entry for entry in run.entries() if entry.key.startswith(key.replace("[]", "[0]"))][:1]
    assert entry.status in ("converted", "differs", "no counterpart")


def test_only_turns_with_a_mark_are_learned_where_axolotl_trains_no_role():
    dataset = {"path": "c/d", "type": "chat_template", "roles_to_train": [], "message_field_training": "train"}
    run = migrate({"base_model": "a/b", "datasets": [dataset]}, "axolotl", None, RECIPES)
    assert ours(run)["dataset.train_on"] == []


@pytest.mark.parametrize("peer", ["axolotl", "llama_factory", "trl"])
def test_max_steps_repeat_the_data_as_in_the_trainer(peer):
    """transformers' Trainer goes on until max_steps, whatever the number of epochs."""
    run = migrate(SMALLEST[peer] | {"max_steps": 1000}, peer, "sft" if peer == "trl" else None, RECIPES)
    after = ours(run)
    assert after["max_steps"] == 1000 and after["epochs"] == 1e6
