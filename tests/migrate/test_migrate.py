"""`tune migrate`: each key of a config is accounted for, and the recipe accepts the result."""

import os
import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from peer_configs import AXOLOTL, LLAMA_FACTORY, TORCHTUNE, TRL

from tune import config
from tune.cli import main
from tune.cli import migrate as verb
from tune.errors import TuneError
from tune.migrate import PEERS, STATUSES, Migration, NotConverted, leaves, migrate, peer_of
from tune.migrate.leaves import resolved
from tune.migrate.migration import each_name
from tune.rules import Facts, judge

FILES = {"axolotl": AXOLOTL, "llama_factory": LLAMA_FACTORY, "torchtune": TORCHTUNE, "trl": TRL}
A, L, T = (
    "base_model: a/b\nsequence_len: 8\n",
    "model_name_or_path: a/b\ntemplate: qwen\n",
    "model_name_or_path: a/b\ndataset_name: c/d\n",
)
S = L + "# torchrun --nproc_per_node 4\nstage: sft\npipeline_model_parallel_size: 2\nper_device_train_batch_size: 3\n"
JUDGE = {"_component_": "tune.generation.RewardModel", "path": "./r"}
EVALUATION = """
model: {_component_: torchtune.models.llama3.llama3_8b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/llama}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: t.model, max_seq_len: null}
dtype: bf16
tasks: [arc_easy]
max_seq_length: 512
batch_size: 4
"""
RECIPES = {
    name: dict(leaves(config.read_file(config.find_config(name)))) for name in config.list_recipes_with_settings()
}
BESIDE = Path(__file__).parents[3] / "shared" / "data" / "configs"
PEER_CONFIGS = Path(os.environ.get("TUNE_PEER_CONFIGS", BESIDE))


def converted(text: str, tmp_path: Path, peer: str | None = None, method: str | None = None) -> Migration:
    file = tmp_path / ("theirs.sh" if "--" in text and "\n#" not in text else "theirs.yaml")
    file.write_text(text)
    values, detected, processes = verb.read(file)
    return migrate(values, peer or peer_of(values, file), method or detected, RECIPES, processes)


def ours(run: Migration) -> dict:
    return {key: setting.value for key, setting in run.changed().items()}


def status(run: Migration) -> dict[str, str]:
    return {entry.key: entry.status for entry in run.entries()}


def loaded(run: Migration, tmp_path: Path, *settings: str):
    verb.check(run)
    file = tmp_path / "ours.yaml"
    file.write_text(verb.render(run, "theirs.yaml"))
    return config.load(run.recipe, ["--config", str(file), *settings])


@pytest.mark.parametrize("peer", FILES)
def test_every_key_is_accounted_for_once_and_the_settings_load(peer, tmp_path):
    run = converted(FILES[peer], tmp_path)
    values = verb.read(next(tmp_path.glob("theirs.*")))[0]
    keys = [entry.key for entry in run.entries()]
    assert run.peer == peer
    assert keys == list(dict(leaves(values)))
    assert {entry.status for entry in run.entries()} <= {*STATUSES} - {"unknown"}
    cfg = loaded(run, tmp_path)
    assert all(OmegaConf.select(cfg, key) == value for key, value in ours(run).items() if not isinstance(value, dict))


@pytest.mark.parametrize(("head", "steps"), [(A, 10), (A, 0), (L, 10)], ids=["axolotl", "no steps", "llama_factory"])
def test_warmup_steps_take_precedence_over_a_ratio(head, steps, tmp_path):
    """Zero steps take precedence only in axolotl."""
    run = converted(f"{head}warmup_steps: {steps}\nwarmup_ratio: 0.5\n", tmp_path)
    made = {entry.key: entry.ours for entry in run.entries()}
    assert made["warmup_steps"] == [f"schedule.warmup={steps}"] and not made["warmup_ratio"]


@pytest.mark.parametrize(
    ("peer", "method", "limit", "expected"),
    [
        ("trl", "dpo", "max_length: 512", 1024),
        ("trl", "orpo", "max_length: 512", 1024),
        ("trl", "reward", "max_length: 512", 1024),
        ("trl", "dpo", "", 2048),  # TRL's default is 1024
        ("trl", "dpo", "max_length: null", None),
        ("trl", "kto", "max_length: 512", 512),  # one answer per row
        ("trl", "sft", "max_length: 512", 512),
        ("axolotl", "dpo", "sequence_len: 512", 1024),
        ("llama_factory", "rm", "cutoff_len: 512", 1024),
        ("torchtune", "dpo", "tokenizer: {max_seq_len: 512}", 1024),
    ],
)
def test_max_seq_len_has_room_for_both_answers_of_a_pair(peer, method, limit, expected, tmp_path):
    """The peers limit each answer with its prompt, max_seq_len both together."""
    run = converted(f"{SOURCE}{limit}\n", tmp_path, peer, method)
    setting = run.settings.get("max_seq_len")
    assert (setting and setting.value) == expected
    told = {entry.key: entry for entry in (*run.entries(), *run.lost())}
    if expected and method not in ("sft", "kto"):
        (key,) = setting.sources
        assert told[key].status == "differs" and "both answers" in told[key].note


@pytest.mark.parametrize(("steps", "warmup", "says"), [(100, 60, "max_steps=60"), (60, 60, "rate of 0")])
def test_warmup_longer_than_the_run(steps, warmup, says, tmp_path):
    run = converted(f"{A}datasets: [{{path: a.jsonl, type: alpaca}}]\nmax_steps: 60\nwarmup_steps: {steps}\n", tmp_path)
    assert ours(run)["schedule.warmup"] == warmup
    assert says in next(entry.note for entry in run.entries() if entry.key == "warmup_steps")
    assert all(finding.place != "schedule.warmup" for finding in judge(Facts(loaded(run, tmp_path))))


def test_axolotl(tmp_path):
    run = converted(AXOLOTL, tmp_path)
    settings = ours(run)
    assert run.recipe == "lora_finetune"
    expected = {
        "model.path": "./Llama-3.2-1B", "model.quantization": "nf4", "adapter.rank": 8, "adapter.alpha": 16,
        "adapter.dropout": 0.05, "dataset.path": "teknium/GPT4-LLM-Cleaned", "dataset.take": 200,
        "dataset.validation_fraction": 0.1, "dataset.too_long": "drop", "max_seq_len": 1024, "packed": True,
        "global_batch_size": 8, "micro_batch_size": 2, "epochs": 3, "schedule.warmup": 0.1, "schedule.min_ratio": 0.0,
        "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.01, "seed": 42,
        "compute.activation_checkpointing": "full", "tokenizer.chat_template": "plain",
    }  # fmt: skip
    assert {key: settings.get(key) for key in expected} == expected
    assert settings["output_dir"] == "./outputs/lora-out" and "optimizer.lr" not in settings  # our default is the same
    statuses = status(run)
    assert statuses["learning_rate"] == statuses["wandb_entity"] == statuses["flash_attention"] == "same by default"
    assert statuses["datasets[0].type"] == "differs" and statuses["val_set_size"] == "differs"


def test_llama_factory(tmp_path):
    run = converted(LLAMA_FACTORY, tmp_path)
    settings = ours(run)
    assert run.recipe == "preference_finetune"
    expected = {
        "loss._component_": "tune.losses.SimPO", "loss.beta": 0.2, "loss.gamma": 0.5, "adapter.rank": 8,
        "adapter.alpha": 16, "adapter.target_modules": ["q_proj", "v_proj"], "dataset.path": "data/dpo_en_demo.json",
        "dataset.take": 500, "global_batch_size": 8, "compute.cpu_offload": True,
        "compute.activation_checkpointing": "full", "tokenizer.chat_template": "llama3", "epochs": 3,
    }  # fmt: skip
    assert {key: settings.get(key) for key in expected} == expected
    assert run.settings["max_seq_len"].value == 2048  # of both answers; cutoff_len=1024 is for each


def test_torchtune(tmp_path):
    run = converted(TORCHTUNE, tmp_path)
    settings = ours(run)
    assert run.recipe == "full_finetune" and run.world_size == 2  # from its comment
    expected = {
        "model.path": "/tmp/llama", "dataset.path": "tatsu-lab/alpaca", "dataset.train_on": "all", "max_seq_len": 4096,
        "global_batch_size": 64, "micro_batch_size": 4, "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.01,
        "schedule._component_": "tune.optimizers.constant", "schedule.warmup": 0, "max_grad_norm": None,
        "compute.master_dtype": "bf16", "compute.activation_checkpointing": "full", "tokenizer.chat_template": "llama3",
    }  # fmt: skip
    assert {key: settings.get(key, "absent") for key in expected} == expected


def test_torchtune_optimizer_and_columns_are_kept(tmp_path):
    text = """
        model: {_component_: torchtune.models.llama3.llama3_8b}
        tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: t.model, max_seq_len: null}
        dataset: {_component_: torchtune.datasets.samsum_dataset}
        optimizer: {_component_: torch.optim.AdamW, betas: [0.8, 0.9]}
    """
    run = converted(text, tmp_path)
    columns = {"instruction": "dialogue", "output": "summary"}
    expected = {"optimizer.betas": [0.8, 0.9], "dataset.columns": columns, "max_seq_len": "absent"}
    assert {key: ours(run).get(key, "absent") for key in expected} == expected
    assert status(run)["tokenizer.max_seq_len"] == "differs"  # torchtune has no limit here
    usual = converted(text.replace("betas", "eps").replace("[0.8, 0.9]", "1.0e-8"), tmp_path)
    assert ours(usual)["optimizer.betas"] == [0.9, 0.999]


def test_our_own_configs_are_not_converted():
    file = config.find_config("full_finetune")
    with pytest.raises(TuneError, match="config of tune"):
        peer_of(config.read_file(file), file)


def test_trl_command_line(tmp_path):
    run = converted(TRL, tmp_path)
    settings = ours(run)
    assert run.recipe == "lora_finetune"
    expected = {
        "dataset.path": "trl-lib/Capybara", "global_batch_size": 32, "packed": True, "adapter.rank": 32,
        "adapter.alpha": 16, "adapter.dropout": 0.05, "adapter.target_modules": ["q_proj", "v_proj"],
        "max_seq_len": 1024, "schedule._component_": "tune.optimizers.linear", "tokenizer.eos_token": "<|im_end|>",
    }  # fmt: skip
    assert {key: settings.get(key) for key in expected} == expected
    assert status(run)["push_to_hub"] == "no counterpart"


@pytest.mark.parametrize(
    ("text", "recipe", "expected"),
    [
        (A + "rl: ipo\nrl_beta: 0.3", "preference_finetune", {"loss.beta": 0.3}),
        (A + "rl: kto\nkto_desirable_weight: 2.0", "preference_finetune", {"loss.desirable": 2}),
        (A + "rl: orpo\norpo_alpha: 0.2", "preference_finetune", {"loss.beta": 0.2}),
        (A + "reward_model: true", "reward_finetune", {}),
        (A + "rl: grpo\ntrl: {num_generations: 4}\nmicro_batch_size: 8", "grpo", {"prompts_per_step": 2}),
        (L + "stage: rm", "reward_finetune", {}),
        (L + "stage: pt\nfinetuning_type: full", "full_finetune", {"dataset.train_on": "all"}),
        (S, "pipeline_finetune", {"parallel.pp": 2, "adapter.rank": 8, "global_batch_size": 6}),
        (S + "finetuning_type: full", "pipeline_finetune", {"parallel.pp": 2, "adapter.rank": None}),
        (S.replace(": 2", ": 1"), "lora_finetune", {"parallel.pp": None}),
        (S.replace("sft", "dpo"), "preference_finetune", {"parallel.pp": None}),
        (L + "stage: kto", "preference_finetune", {"loss._component_": "tune.losses.KTO", "dataset.kind": "labelled"}),
        (L + "stage: ppo", "ppo_finetune", {}),
        ("trl ppo --dataset_name c/d --model_name_or_path ./m --sft_model_path ./s --reward_model_path ./r",
         "ppo_finetune",
         {"model.path": "./s", "value.path": "./r", "reward": JUDGE, "value_weight": 0.1, "optimizer.lr": 3e-6}),
        (T + "num_generations: 4\nreward_model_name_or_path: ./r", "grpo", {"reward": JUDGE}),
        (EVALUATION, "evaluate", {"tasks": ["arc_easy"], "max_length": 512, "batch_size": 4}),
        (T + "num_generations: 4\nbeta: 0.04", "grpo", {"kl": 0.04, "group_size": 4}),
        (T + "teacher_model_name_or_path: e/f\nbeta: 1", "distill", {"loss._component_": "tune.losses.ReverseKL"}),
    ],
)  # fmt: skip
def test_methods(text, recipe, expected, tmp_path):
    run = converted(text, tmp_path)
    assert run.recipe == recipe
    assert {key: ours(run).get(key) for key in expected} == expected
    missing = verb.check(run)
    loaded(
        run,
        tmp_path,
        *(f"{key}=x.y" for key in missing if key != "reward"),
        *(["reward=tune.evaluation.exact_match"] * ("reward" in missing)),
    )


@pytest.mark.parametrize(
    "text",
    [
        A + "rl: grpo\nval_set_size: 0.0\ntrl: {num_generations: 4, top_k: 0}",
        L + "stage: ppo\ntop_k: 0",
        T + "num_generations: 4\ntop_k: -1",
    ],
)
def test_disabled_features_stay_off(text, tmp_path):
    run = converted(text, tmp_path)
    off = [entry for entry in run.entries() if re.search("top_k|val_set_size", entry.key)]
    assert {entry.status for entry in off} == {"same by default"} and not any(entry.ours for entry in off)


def test_reference_on_the_hub_becomes_a_folder_to_download(tmp_path):
    run = converted(L + "stage: dpo\nref_model: a/base", tmp_path)
    assert ours(run)["reference"] == "./base"
    assert next(entry.note for entry in run.entries() if entry.key == "ref_model") == "tune download a/base"


def test_existing_folder_is_not_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m" / "llama").mkdir(parents=True)
    assert ours(converted("base_model: m/llama\nsequence_len: 8\n", tmp_path))["model.path"] == "m/llama"


def test_units_of_batches(tmp_path):
    text = A + "micro_batch_size: 2\ngradient_accumulation_steps: 4\nrl: dpo"
    run = converted(text, tmp_path)
    note = {entry.key: entry.note for entry in run.entries()}["micro_batch_size"]
    assert ours(run).get("global_batch_size", 16) == 8
    assert "2 per device x 4 accumulated x 1 devices" in note
    assert ours(migrate(verb.read(tmp_path / "theirs.yaml")[0], "axolotl", None, RECIPES, 4))["global_batch_size"] == 32
    axes = "\ndp_shard_size: 2\ntensor_parallel_size: 2\ncontext_parallel_size: 2"
    shared = converted(text + axes, tmp_path)
    assert ours(shared).get("global_batch_size", 16) == 2 * 4 * 2
    note = {entry.key: entry.note for entry in shared.entries()}["micro_batch_size"]
    assert "x 2 groups of 4 devices" in note


def test_differences_are_reported(tmp_path):
    run = converted(T + "num_generations: 8\nscale_rewards: group\nsteps_per_generation: 4\noptim: adafactor", tmp_path)
    notes = {entry.key: (entry.status, entry.note) for entry in run.entries()}
    statuses = status(
        converted(L + "shift_attn: true\noverwrite_output_dir: true\nnew_special_tokens: [<x>]", tmp_path)
    )
    assert statuses["shift_attn"] == statuses["new_special_tokens"] == "no counterpart"
    assert statuses["overwrite_output_dir"] == "differs"
    for key, words in {"scale_rewards": "standard dev", "steps_per_generation": "updates", "optim": "RMS"}.items():
        assert notes[key][0] == "differs" and words in notes[key][1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rpo_alpha: 0.3", "beside-that-of-preferences, with supervised_weight: 0.3"),
        ("loss_type: [sigmoid, sft]\nloss_weights: [0.5, 1.0]", "supervised_weight: 2"),
        ("loss_type: [sft, ipo]", "supervised_weight: 1"),
        ("loss_type: [sigmoid, sft]\nloss_weights: [1, 0]", "supervised_weight: 0"),
        ("loss_type: [sigmoid, sft, sft]", "another-loss-of-preferences"),
        ("loss_type: [sigmoid, bco_pair]", "another-loss-of-preferences"),
        ("neftune_noise_alpha: 5", "changes.md#noise-on-the-embeddings, with noise_alpha: 5"),
    ],
)
def test_edits_are_named_with_their_value(text, words, tmp_path):
    run = converted(T + text, tmp_path, "trl", "dpo")
    key = text.partition(":")[0]
    (entry,) = [entry for entry in run.entries() if entry.key == key]
    assert entry.status == "no counterpart" and words in entry.note
    assert run.settings["loss._component_"].value == f"tune.losses.{'IPO' if 'ipo' in text else 'DPO'}"
    off = converted(f"{T}rpo_alpha: 0.0\nneftune_noise_alpha: 0\n", tmp_path, "trl", "dpo")
    assert {status(off)[key] for key in ("rpo_alpha", "neftune_noise_alpha")} == {"same by default"}


def test_losses_of_grpo(tmp_path):
    text = T + "num_generations: 4\nloss_type: "
    outcomes = [status(converted(text + name, tmp_path))["loss_type"] for name in ("dapo", "grpo", "dr_grpo")]
    assert outcomes == ["same by default", "differs", "differs"]


def test_sampling_by_vllm_is_off_unless_it_is_set(tmp_path):
    keys = "\nvllm_mode: server\nvllm_gpu_memory_utilization: 0.3\nvllm_importance_sampling_correction: false\n"
    text = T + "num_generations: 4\nuse_vllm: "
    on = converted(f"{text}true{keys}", tmp_path)
    notes = {entry.key: entry.note for entry in on.entries() if "vllm" in entry.key}
    assert {status(on)[key] for key in notes} == {"differs"} and "sampling._component_" not in ours(on)
    assert "sampling._component_=tune.generation.VLLM sampling.path=./b" in notes["use_vllm"]
    assert "sampling.memory=0.3" in notes["vllm_gpu_memory_utilization"]
    assert "vllm_importance_sampling_correction" in {entry.key for entry in converted(text + "true", tmp_path).lost()}
    off = converted(f"{text}false{keys}", tmp_path)
    assert {status(off)[key] for key in notes} == {"same by default"}
    teacher = converted(f"{T}teacher_model_name_or_path: e/f\nuse_vllm: true\n", tmp_path)
    assert status(teacher)["use_vllm"] == "no counterpart"  # distill has no such sampler


def test_template_of_a_model_folder_is_its_file(tmp_path):
    """TRL also takes a folder or a model of the hub; tokenizer.chat_template takes a file."""
    for folder in ("with", "without"):
        (tmp_path / folder).mkdir()
    file = tmp_path / "with" / "chat_template.jinja"
    file.write_text("{{ messages }}")
    for path, template in (
        (tmp_path / "with", str(file)), (file, str(file)), (tmp_path / "without", None), ("other/model", None),
    ):  # fmt: skip
        run = converted(f"{T}use_peft: true\nchat_template_path: {path}\n", tmp_path)
        assert ours(run).get("tokenizer.chat_template") == template
        assert status(run)["chat_template_path"] == ("converted" if template else "no counterpart")
    assert "tune download other/model" in next(
        entry.note for entry in run.entries() if entry.key == "chat_template_path"
    )


def test_tokenizing_processes(tmp_path):
    text = T + "dataset_num_proc: 4\n"
    assert ours(converted(text, tmp_path, "trl", "dpo"))["dataset.workers"] == 4
    assert ours(converted(text, tmp_path, "trl", "grpo"))["dataset.workers"] == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward_funcs: [is_right, my_lib.is_short]\nreward_weights: [2.0, 0.5]",
         [{"_component_": "my_rewards.is_right", "weight": 2.0}, {"_component_": "my_lib.is_short", "weight": 0.5}]),
        ("reward_funcs: is_right", [{"_component_": "my_rewards.is_right", "weight": 1.0}]),
    ],
)  # fmt: skip
def test_reward_functions_are_written_as_a_setting(text, expected, tmp_path):
    run = converted(f"{T}num_generations: 4\n{text}\n", tmp_path)
    note = next(entry.note for entry in run.entries() if entry.key == "reward_funcs")
    assert yaml.safe_load(note[note.index("reward: [") :]) == {"reward": expected}
    assert "reward" in verb.check(run)


@pytest.mark.slow
def test_report_ends_with_a_summary(tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text(T + "max_length: 8\nneftune_noise_alpha: 5\nrpo_alpha: 1.0\n")
    main(["migrate", str(file), "--method", "sft"])  # exit code 0
    assert capsys.readouterr().err.splitlines()[-3] == "2 settings have no counterpart"
    file.write_text(T + "max_length: 8\nneftune_noise_alpha: 5\nlora_rr: 1\n")
    with pytest.raises(SystemExit) as end:
        main(["migrate", str(file), "--method", "sft"])
    summary = capsys.readouterr().err.splitlines()[-3]
    assert end.value.code == 1 and summary.startswith("1 setting has no counterpart, 1 is unknown")


def test_counts_per_epoch_differ_from_counts_of_steps(tmp_path):
    statuses = status(converted(A + "evals_per_epoch: 4\nsaves_per_epoch: 1", tmp_path))
    assert statuses["evals_per_epoch"] == statuses["saves_per_epoch"] == "differs"


def test_ppo_steps_are_not_completions(tmp_path):
    """In torchtune, PPO divides num_steps by batch_size, but GRPO does not."""
    ppo = "batch_size: 64\nnum_steps: 10000\nppo_epochs: 2\nvalue_checkpointer: {checkpoint_dir: /tmp/v}\n"
    migration = converted(ppo, tmp_path, "torchtune")
    assert ours(migration)["max_steps"] == 156 and status(migration)["num_steps"] == "differs"
    assert ours(converted("batch_size: 2\nnum_steps: 200\ngrpo_samples: 4", tmp_path, "torchtune"))["max_steps"] == 200


def test_trl_scripts_validate_on_a_split_of_the_same_data(tmp_path):
    """Only if eval_strategy enables validation."""
    text = "model_name_or_path: a/b\ndataset_name: c/d\neval_steps: 50\n"
    for more, split in (("eval_strategy: steps", "test"), ("eval_strategy: steps\ndataset_test_split: dev", "dev")):
        settings = ours(converted(f"{text}{more}", tmp_path, "trl"))
        assert settings["dataset.validation"] == {"split": split} and settings["dataset.path"] == "c/d"
        assert settings["evaluate.every"] == 50
    for more in ("dataset_test_split: dev", "eval_strategy: 'no'", "eval_strategy: no"):
        run = converted(f"{text}{more}", tmp_path, "trl")
        assert not {"dataset.validation", "evaluate.every"} & ours(run).keys()
        assert status(run)["eval_steps"] == "no counterpart"  # it would be a clock of nothing


def test_conversations_mixed_with_instructions_keep_their_template(tmp_path):
    text = A + "datasets: [{path: one.jsonl, type: alpaca}, {path: two.jsonl, type: TYPE}]"
    assert ours(converted(text.replace("TYPE", "alpaca"), tmp_path))["tokenizer.chat_template"] == "plain"
    run = converted(text.replace("TYPE", "chat_template"), tmp_path)
    assert "tokenizer.chat_template" not in ours(run)
    assert "datasets[1].type=chat_template" in {entry.key: entry.note for entry in run.entries()}["datasets[0].type"]


def test_several_sources_become_a_mixture(tmp_path):
    text = A + "train_on_inputs: true\ndatasets: [{path: c/one, split: 'train[:50]'}, {path: two.jsonl}]"
    run = converted(text, tmp_path)
    cfg = loaded(run, tmp_path)
    assert cfg.dataset._component_ == "tune.datasets.mix"
    one = {"path": "c/one", "split": "train", "take": 50, "train_on": "all", "too_long": "drop"}
    assert cfg.dataset.sources == {"one": one, "two": {"path": "two.jsonl", "train_on": "all", "too_long": "drop"}}


@pytest.mark.slow
def test_conversation_before_compared_answers_is_their_prompt(tmp_path):
    for name, columns in (("prompt", {}), ("conversation", {"prompt": "conversation"}), ("messages", {})):
        text = A + f"rl: dpo\ndatasets: [{{path: c/d, type: chat_template.default, field_messages: {name}}}]"
        run = converted(text, tmp_path)
        assert ours(run).get("dataset.columns", {}) == columns
        loaded(run, tmp_path)


def test_stream_has_no_epochs(tmp_path):
    text = T + "num_train_epochs: 2\nmax_steps: 7\ndataset_streaming: "
    assert "epochs" not in ours(converted(text + "true", tmp_path))
    assert ours(converted(text + "false", tmp_path))["epochs"] == 1e6  # max_steps alone ends the run
    text = L + "dataset: a,b\nstreaming: true\nbuffer_size: 9\nmax_steps: 100\nnum_train_epochs: 2\n"
    mixture = ours(converted(text, tmp_path))
    assert mixture["epochs"] == 2 and "streaming" not in str(mixture) and "buffer" not in str(mixture)


@pytest.mark.parametrize(
    ("way", "weights", "ends"),
    [
        ("interleave_over\ninterleave_probs: 0.7,0.3", [0.7, 0.3], "all_exhausted"),
        ("interleave_under", [1, 1], "first_exhausted"),
        ("concat\ninterleave_probs: 0.7,0.3", [None, None], None),
    ],
)
def test_interleaved_sources(way, weights, ends, tmp_path):
    run = converted(L + f"stage: sft\ndataset: a,b\nmix_strategy: {way}\n", tmp_path)
    settings = ours(run)
    assert [source.get("weight") for source in settings["dataset.sources"].values()] == weights
    assert settings.get("dataset.epoch_ends") == ends
    loaded(run, tmp_path)


def test_pretraining_texts_are_split_and_packed(tmp_path):
    text = A + "pretraining_dataset: [{path: c/d, name: e, type: pretrain}]"
    settings = ours(converted(text, tmp_path))
    expected = {"dataset.path": "c/d", "dataset.subset": "e", "dataset.streaming": True, "dataset.train_on": "all"}
    assert settings.items() >= {**expected, "dataset.too_long": "split", "packed": True}.items()


def test_single_ratio_bound_sets_both_bounds(tmp_path):
    for text, high in (("epsilon: 0.1", 0.1), ("epsilon: 0.1\nepsilon_high: 0.3", 0.3), ("epsilon_high: 0.3", 0.3)):
        settings = ours(converted(T + "num_generations: 4\n" + text, tmp_path))
        assert settings["loss._component_"] == "tune.losses.ClippedPolicy" and settings["loss.high"] == high


QAT = "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"


@pytest.mark.parametrize(
    ("text", "key", "section"),
    [
        (TORCHTUNE + f"quantizer: {{_component_: {QAT}}}", "quantizer._component_", "weights-rounded-in-training"),
        (A + "qat: {weight_dtype: int8, activation_dtype: int8}", "qat.weight_dtype", "weights-rounded-in-training"),
        (A + "qat: {weight_dtype: nvfp4}", "qat.weight_dtype", "weights-rounded-in-training"),
        (A + "profiler_steps: 3", "profiler_steps", "a-trace-of-some-steps"),
        (TORCHTUNE + "profiler: {enabled: true, active_steps: 2}", "profiler.enabled", "a-trace-of-some-steps"),
        (L + "enable_torch_profiler: true", "enable_torch_profiler", "a-trace-of-some-steps"),
        (L + "train_from_scratch: true", "train_from_scratch", "random-initial-weights"),
    ],
)
def test_what_is_an_edit_of_a_copied_recipe_is_named(text, key, section, tmp_path):
    run = converted(text, tmp_path)
    (entry,) = [entry for entry in run.entries() if entry.key == key]
    assert entry.status == "no counterpart" and f"docs/changes.md#{section}" in entry.note
    loaded(run, tmp_path, "dataset.path=d")
    off = converted(re.sub(r"(enabled|_profiler|_scratch): true", r"\1: false", text), tmp_path)
    assert off.theirs == run.theirs or status(off)[key] == "same by default"


def test_default_of_a_key_that_is_an_edit_is_named(tmp_path):
    """axolotl rounds to int8 if `qat` names no type."""
    run = converted(A + "qat: {activation_dtype: int8}\n", tmp_path)
    (entry,) = [entry for entry in run.lost() if entry.key == "qat.weight_dtype"]
    assert entry.value == "int8" and "weights-rounded-in-training" in entry.note


WANDB, BOARD = "tune.loggers.WeightsAndBiases", "tune.loggers.TensorBoard"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (T + "report_to: tensorboard", [BOARD]),
        (T + "report_to: [wandb, tensorboard]\nrun_name: mine",
         [BOARD, {"_component_": WANDB, "project": "huggingface", "name": "mine"}]),
        (T + "wandb_project: ours\nreport_to: wandb", [{"_component_": WANDB, "project": "ours"}]),
        (T + "report_to: mlflow", [{"_component_": "tune.loggers.MLflow", "experiment": "huggingface"}]),
        (T + "report_to: trackio", [{"_component_": "tune.loggers.Trackio", "project": "huggingface"}]),
        (T + "report_to: none\nlogging_steps: 1", None),
        (T + "logging_steps: 10", [{"_component_": "tune.loggers.Console", "every": 10}]),
        (A + "use_tensorboard: true\nwandb_project: ours\nwandb_name: mine\nlogging_steps: 5",
         [BOARD, {"_component_": WANDB, "project": "ours", "name": "mine"},
          {"_component_": "tune.loggers.Console", "every": 5}]),
        (A + "use_tensorboard: false", None),
        (TORCHTUNE.replace("DiskLogger", "WandBLogger\n  project: ours"),
         [{"_component_": WANDB, "project": "ours"}]),
    ],
)  # fmt: skip
def test_trackers_are_one_list(text, expected, tmp_path):
    run = converted(text, tmp_path)
    assert ours(run).get("trackers") == expected
    assert loaded(run, tmp_path, "dataset.path=d").trackers == (expected or [])
    assert "unknown" not in status(run).values()


@pytest.mark.parametrize(("line", "key"), [("run_name: mine", "run_name"), ("logging_steps: 0.1", "logging_steps")])
def test_what_no_tracker_takes_is_named(line, key, tmp_path):
    run = converted(T + line, tmp_path)
    assert status(run)[key] == "no counterpart" and "trackers" not in ours(run)


def test_trackers_that_are_not_supported_are_named_beside_others(tmp_path):
    run = converted(T + "report_to: [wandb, comet_ml]", tmp_path)
    assert ours(run)["trackers"] == [{"_component_": WANDB, "project": "huggingface"}]
    assert status(run)["report_to"] == "differs"


@pytest.mark.parametrize(
    ("text", "validations"),
    [
        (L + "stage: sft\ndataset: a,b\neval_dataset: c", ["data/c.json", None]),
        (L + "stage: sft\ndataset: a,b\neval_dataset: c,d", ["data/c.json", "data/d.json"]),
        (A + "datasets: [{path: c/a, type: chat_template}, {path: c/b, split: s, type: chat_template}]\n"
         "test_datasets: [{path: c/b, split: t}]", [None, {"split": "t"}]),
        (A + "datasets: [{path: c/a, name: n, split: s, type: chat_template}, {path: c/b, type: chat_template}]\n"
         "test_datasets: [{path: c/e}]", [{"path": "c/e", "split": "train", "subset": None}, None]),
    ],
)  # fmt: skip
def test_validation_data_go_to_the_sources_of_a_mixture(text, validations, tmp_path):
    """To the source with the same path, else to the first without; a source's own split and subset are not taken."""
    run = converted(text + "\neval_steps: 5", tmp_path)
    cfg = loaded(run, tmp_path)
    assert [source.get("validation") for source in cfg.dataset.sources.values()] == validations
    assert cfg.evaluate.every == 5


def test_validation_data_beyond_the_sources_are_named(tmp_path):
    run = converted(L + "stage: sft\ndataset: a\neval_dataset: c,d\nval_size: 0.1", tmp_path)
    assert ours(run)["dataset.validation"] == "data/c.json"
    assert status(run)["eval_dataset"] == status(run)["val_size"] == "no counterpart"
    loaded(run, tmp_path)


TT = "checkpointer: {checkpoint_dir: '${base}/m'}\nbase: /tmp\ntokenizer: {_component_: torchtune.models.x.tokenizer}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (L + "stage: ppo\nreward_model: ./r\nreward_model_type: full", {"model.path": "./b", "reward": JUDGE}),
        (L + "pure_bf16: true\nfinetuning_type: full", {"compute.dtype": None, "compute.master_dtype": "bf16"}),
        (L + "dataset_dir: ONLINE\ndataset: c4", {"dataset.path": "c4"}),
        (A + "datasets: [{path: c/d, field_messages: talk}]", {"dataset.columns": {"messages": "talk"}}),
        (A + "datasets: [{path: c/d, type: chatml.intel}]\nrl: dpo", {"dataset.columns": {"prompt": "question"}}),
        (A + "datasets: [{path: c/d, train_on_eos: none}]", {"dataset.train_on_end_of_turn": False}),
        (T + "dataset_mixture: {datasets: [{id: c/e, config: f, split: g}]}", {"dataset.path": "c/e"}),
        ("trl grpo --dataset_name c/d --no_gradient_checkpointing", {"compute.activation_checkpointing": None}),
        (TT + "dataset: [{source: c/d, train_on_input: true, column_map: {input: q}}]",
         {"dataset.train_on": "all", "dataset.columns": {"instruction": "q"}, "model.path": "/tmp/m"}),
        (TT + "dataset_val: {source: json, data_files: v.json}", {"dataset.validation": "v.json"}),
        (TT + "enable_fp8_training: true\nfp8_recipe_name: tensorwise", {"model.float8": "tensorwise"}),
        (TT + "enable_fp8_training: false\nfp8_recipe_name: rowwise", {"model.float8": None}),
        (TT + "compile: {model: true, loss: false}\nenable_async_checkpointing: false",
         {"compute.compile": True, "checkpointer.async": False}),
        (A + "loraplus_lr_ratio: 16\nembedding_lr_scale: 0.5\nadapter: lora",
         {"parameter_groups.lr_ratios": {"lora_b": 16, "embedding": 0.5}}),
        (A + "gradient_checkpointing: offload",
         {"compute.activation_checkpointing": "full", "compute.activation_offload": True}),
        (L + "freeze_vision_tower: true\ngradient_checkpointing: true", {"compute.activation_checkpointing": "full"}),
        (TT + "ppo_epochs: 2\nvalue_checkpointer: {checkpoint_dir: rm}\nreward_checkpointer: {checkpoint_dir: ./r}\n"
         "dataset: {source: c/d, column: query}",
         {"value.path": "rm", "reward": JUDGE, "dataset.columns": {"prompt": "query"}}),
    ],
)  # fmt: skip
def test_keys_apply_only_to_their_own_part(text, expected, tmp_path):
    run = converted(text, tmp_path)
    assert {key: ours(run).get(key) for key in expected} == expected
    assert "unknown" not in status(run).values()


def test_resumed_adapter_keeps_its_own_shape(tmp_path):
    run = converted(L + "stage: sft\nadapter_name_or_path: ./a\nlora_rank: 4\nlora_dropout: 0.1\n", tmp_path)
    settings = {key: value for key, value in ours(run).items() if key.startswith("adapter")}
    assert settings == {"adapter.path": "./a", "adapter.dropout": 0.1} and status(run)["lora_rank"] == "same by default"
    assert (
        status(converted(L + "stage: sft\ncreate_new_adapter: true", tmp_path))["create_new_adapter"]
        == "no counterpart"
    )


@pytest.mark.parametrize(("stage", "reference"), [("dpo", "./b"), ("sft", None), ("kto", None)])
def test_llama_factory_uses_the_base_as_reference(stage, reference, tmp_path):
    text = f"stage: {stage}\nfinetuning_type: lora\nmodel_name_or_path: ./b\nadapter_name_or_path: ./a\n"
    assert ours(converted(text, tmp_path)).get("reference") == reference
    without = converted(text + "pref_loss: simpo\n", tmp_path)
    (path_entry,) = (entry for entry in without.entries() if entry.key == "adapter_name_or_path")
    assert ours(without)["adapter.path"] == "./a" and "reference" not in ours(without) | {"": path_entry.note}


def test_llama_factory_kto_has_its_own_loss(tmp_path):
    text = L + "pref_loss: PREF\nstage: STAGE\n"
    losses = {}
    for stage, pref in (("dpo", "ipo"), ("kto", "sigmoid")):
        run = converted(text.replace("PREF", pref).replace("STAGE", stage), tmp_path)
        losses[stage] = ours(run)["loss._component_"], "dpo_loss" in str(run.faults())
    assert losses == {"dpo": ("tune.losses.IPO", True), "kto": ("tune.losses.KTO", False)}


@pytest.mark.parametrize(
    ("line", "key", "words"),
    [
        ("train_on_prompt: true", "train_on_prompt", "first token of a row"),
        ("dataset: alpaca_en_demo", "dataset", "one line break"),
        ("warmup_ratio: 0.1", "warmup_ratio", "rounds up"),
        ("use_muon: true", "use_muon", "bf16"),
        ("pissa_init: true\nfinetuning_type: lora", "pissa_init", "pissa_iter"),
    ],
)
def test_differences_in_loss_curves_are_named(line, key, words, tmp_path):
    run = converted(L + "stage: sft\n" + line, tmp_path)
    assert words in {entry.key: entry.note for entry in run.entries()}[key]
    assert "<|im_end|>" in str(run.faults())


def test_faults_depend_on_the_method(tmp_path):
    faults = [str(converted(T + f"num_generations: {number}", tmp_path).faults()) for number in ("null", "4")]
    assert "max_length=1024" in faults[0] and "max_length" not in faults[1] and "EOS" not in faults[1]


def test_compute_dtypes(tmp_path):
    full, on_cpu = "finetuning_type: full\n", "use_cpu: true\n"
    for text, kind in (
        ("bf16: true", None), ("fp16: true", "fp16"), (full, "fp32"), (full + "bf16: false", "fp32"),
        ("", None), ("bf16: false", None), (on_cpu + "bf16: false", "fp32"),  # the LoRA base keeps its own dtype
    ):  # fmt: skip
        assert ours(converted(L + text, tmp_path)).get("compute.dtype") == kind, text
    run = converted(T + "fp16: true", tmp_path)  # in TRL, bf16 is the default
    assert ours(run)["compute.dtype"] == "fp16"
    run = converted(A + "bf16: false\nfp16: true", tmp_path)
    assert "bf16 needs none" in {entry.key: entry.note for entry in run.entries()}["fp16"]


def test_rest_of_a_split_is_held_out(tmp_path):
    text = TORCHTUNE.replace("packed: false", "split: train[:95%]") + (
        "dataset_val:\n  _component_: torchtune.datasets.alpaca_dataset\n  split: train[95%:]\n"
    )
    settings = ours(converted(text, tmp_path))
    assert settings["dataset.validation_fraction"] == 0.05
    assert "dataset.validation" not in settings


def test_rejected_setting_is_named_and_left_out(tmp_path):
    text = AXOLOTL.replace("lora_dropout: 0.05", "lora_dropout: 5") + "early_stopping_patience: 3\n"
    run = converted(text, tmp_path)
    loaded(run, tmp_path)
    entries = {entry.key: entry for entry in run.entries()}
    assert entries["lora_dropout"].status == entries["early_stopping_patience"].status == "no counterpart"
    assert "from 0 to" in entries["lora_dropout"].note or "0" in entries["lora_dropout"].note
    assert "checkpointer.keep_best" in entries["early_stopping_patience"].note


def test_misspelled_keys_are_named(tmp_path, capsys):
    (tmp_path / "theirs.yaml").write_text(AXOLOTL + "lora_rr: 8\n")
    with pytest.raises(SystemExit) as end:
        main(["migrate", str(tmp_path / "theirs.yaml"), "--out", str(tmp_path / "ours.yaml")])
    assert end.value.code == 1
    assert re.search("lora_rr: 8 .*'lora_r'", capsys.readouterr().out)
    assert (tmp_path / "ours.yaml").exists()


@pytest.mark.slow
def test_file_names_the_origin_of_each_line(tmp_path, capsys):
    (tmp_path / "theirs.yaml").write_text(AXOLOTL)
    main(["migrate", str(tmp_path / "theirs.yaml")])
    shown = capsys.readouterr()
    assert "max_seq_len: 1024  # sequence_len: 1024" in shown.out
    assert "warmup: 0.1  # warmup_ratio: 0.1" in shown.out
    assert "axolotl's default of seed" in shown.out
    assert "transformers/pull/34191" in shown.err
    assert "tune run lora_finetune --config FILE.yaml" in shown.err
    main(["migrate", str(tmp_path / "theirs.yaml"), "--world-size", "4"])
    assert "tune run --nproc-per-node 4 lora_finetune --config FILE.yaml" in capsys.readouterr().err


def test_secrets_are_left_out(tmp_path, capsys):
    (tmp_path / "theirs.yaml").write_text(LLAMA_FACTORY + "hub_token: hf_" + "a" * 34 + "\n")
    main(["migrate", str(tmp_path / "theirs.yaml")])
    shown = capsys.readouterr()
    assert "hf_aaa" not in shown.out + shown.err


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("", 2, "is empty"),
        ("- a\n- b\n", 2, "not a list"),
        ("a: [1\n", 2, "this is not YAML"),
        ("seed: 3\nlayers: 4\n", 2, "--from"),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", 2, "--world-size N"),
        (T + "num_processes: many\n", 2, "not 'many'"),
        ("num_processes: 8\nmixed_precision: bf16\n", 2, "--world-size 8"),
        ("deepspeed_config: {zero3_save_16bit_model: true}\nnum_machines: 1\nnum_processes: 4\n", 2, "--world-size 4"),
        ("model: {_component_: tune.models.build, path: x}\nseed: 8\n", 2, "config of tune"),
        (A + "rl: dpoo\n", 2, "'dpo'?"),
        (L + "stage: sftt\n", 2, "'sft'?"),
        (A + "rl: gdpo\n", 3, "rl: gdpo"),
        (A + "processor_type: AutoProcessor\n", 3, "processor_type: "),
        (L + "export_dir: merged\n", 3, "tune merge"),
        (L + "dataset: mllm_demo\n", 3, "dataset: "),
        ("tokenizer: {_component_: torchtune.models.x.x_tokenizer}\nprompt: {user: Hi}\n", 3, "tune generate"),
        ("trl sftt --model_name_or_path a/b\n", 2, "'sft'?"),
    ],
)  # fmt: skip
def test_invalid_inputs_are_rejected(text, code, message, tmp_path, capsys):
    file = tmp_path / ("theirs.sh" if "--" in text else "theirs.yaml")
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["migrate", str(file), "--out", str(tmp_path / "ours.yaml")])
    assert (end.value.code, message in capsys.readouterr().err) == (code, True)
    assert not (tmp_path / "ours.yaml").exists()


@pytest.mark.parametrize("peer", [[], ["--from", "trl"]])
def test_python_scripts_are_not_read(peer, tmp_path, capsys):
    """The usage in the docstring of a script is not its configuration."""
    (tmp_path / "train_sft.py").write_text(
        '"""\npython train_sft.py --learning_rate 1.0\n"""\nSFTConfig(max_length=8)\n'
    )
    with pytest.raises(SystemExit) as end:
        main(["migrate", str(tmp_path / "train_sft.py"), "--out", str(tmp_path / "ours.yaml"), *peer])
    told = capsys.readouterr().err
    assert end.value.code == 2 and not (tmp_path / "ours.yaml").exists()
    assert all(word in told for word in ("Python", "YAML", "SFTConfig", "lora_r", "lora_target_modules"))


ACCELERATE = (
    "num_processes: 4\nmixed_precision: MIXED\ndistributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}\n"
)
OF_LAUNCH = [f"accelerate.{key}" for key in ("num_processes", "mixed_precision", "distributed_type")]
AN_SFT = "sft --dataset_name c/d --per_device_train_batch_size 3"


@pytest.mark.parametrize(
    ("command", "devices"),
    [
        (f"accelerate launch --config_file acc.yaml -m trl {AN_SFT}", 4),
        (
            f"CUDA_VISIBLE_DEVICES=0 accelerate launch --config_file=acc.yaml --use_fsdp \\\n  a/b/sft.py {AN_SFT[3:]}",
            4,
        ),
        (f"accelerate launch --config_file acc.yaml --num_processes 2 sft.py {AN_SFT[3:]}", 2),
        (f"trl {AN_SFT} --accelerate_config acc.yaml", 4),
        (f"trl {AN_SFT} --accelerate_config acc.yaml --num_processes 2", 2),
    ],
)
def test_config_of_accelerate_launch_is_read(command, devices, tmp_path):
    (tmp_path / "acc.yaml").write_text(ACCELERATE.replace("MIXED", "fp16"))
    run = converted(command, tmp_path)
    assert run.world_size == devices and ours(run)["global_batch_size"] == 3 * devices
    assert (
        ours(run)["compute.cpu_offload"] is True and ours(run).get("compute.dtype", "bf16") == "bf16"
    )  # TRL's bf16 decides
    assert {status(run)[key] for key in OF_LAUNCH} == {"same by default"} and "unknown" not in status(run).values()
    off = converted(f"{command} --bf16 false", tmp_path)
    assert ours(off)["compute.dtype"] == "fp16"
    loaded(off, tmp_path, "model.path=m")


def test_config_of_accelerate_launch_that_is_elsewhere_is_named(tmp_path):
    run = converted(f"accelerate launch --config_file examples/acc.yaml -m trl {AN_SFT}", tmp_path)
    (entry,) = [entry for entry in run.entries() if entry.key == "accelerate.config_file"]
    assert (entry.value, entry.status) == ("examples/acc.yaml", "no counterpart") and "--world-size" in entry.note


def test_trl_yaml_may_name_its_processes(tmp_path):
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    assert converted(T + "accelerate_config: acc.yaml\nuse_peft: true\n", tmp_path).world_size == 4
    run = converted(T + "num_processes: 2\nmixed_precision: bf16\nuse_peft: true\n", tmp_path)
    assert run.world_size == 2 and {status(run)[key] for key in OF_LAUNCH[:2]} == {"same by default"}


def test_unlike_keys_are_not_suggested():
    library = PEERS["axolotl"]
    assert {library.look_up(key) for key in ("num_machines", "mixed_precision", "config_file")} == {("unknown", "")}
    assert "'lora_target_modules'" in PEERS["trl"].look_up("lora_target")[1]


def test_command_line_options(tmp_path):
    (tmp_path / "sft.yaml").write_text("dataset_name: c/d\nlearning_rate: 1e-3\n")
    (tmp_path / "run.sh").write_text(
        "#!/bin/sh\nexport A=1\n# trl dpo --beta 1\ntrl sft --config sft.yaml --max-length=64 \\\n"
        "  --model_name_or_path a/b --packing --lora_target_modules q_proj v_proj --eos_token '{'\n"
    )
    values, method, processes = verb.read(tmp_path / "run.sh")
    assert (method, processes) == ("sft", 1)
    assert values == {
        "dataset_name": "c/d", "learning_rate": 1e-3, "max_length": 64, "model_name_or_path": "a/b", "packing": True,
        "lora_target_modules": ["q_proj", "v_proj"], "eos_token": "{",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.yaml"], "No such file"),
        (["."], "Is a directory"),
        (["theirs.yaml", "--world-size", "0"], "--world-size: '0' is not a number of at least 1"),
        (["theirs.yaml", "--out", "theirs.yaml"], "already exists"),
        (["theirs.yaml", "--from", "axolotll"], "invalid choice"),
        (["theirs.yaml", "--method", "dpoo"], "--method: unknown method dpoo. Did you mean 'dpo'?"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(AXOLOTL)
    with pytest.raises(SystemExit) as end:
        main(["migrate", *arguments])
    assert (end.value.code, message in capsys.readouterr().err) == (2, True)


def targets_of(convert) -> list[str]:
    """Return the settings that a `To` or a `Choose` names; functions name theirs at run time."""
    choices = [
        choice[0] if isinstance(choice, tuple) else choice for choice in getattr(convert, "choices", {}).values()
    ]
    several = [target for choice in choices if isinstance(choice, dict) for target in choice]
    return [*getattr(convert, "targets", ()), *several]


def test_tables_name_only_existing_settings():
    known = {key for recipe in RECIPES.values() for key in recipe}
    groups = {key.removesuffix("._component_") for key in known if key.endswith("._component_")}
    named = {target for peer in PEERS.values() for convert in peer.keys.values() for target in targets_of(convert)}
    assert len(named) > 80
    for target in named:
        is_argument = target.rpartition(".")[0] in {*groups, "adapter"}
        assert target == "recipe" or target.startswith("parts.") or target in known or is_argument, target


def test_table_entries_do_not_hide_each_other():
    for peer in PEERS.values():
        for table in ("keys", "always", "lacking"):
            names = each_name(getattr(peer, table))
            assert [name for name in names if peer.look_up(name)[0] != table] == []


def test_method_in_capitals_has_the_same_defaults(tmp_path):
    runs = [converted(T, tmp_path, "trl", method) for method in ("sft", "SFT")]
    assert ours(runs[0]) == ours(runs[1]) and "dataset.too_long" in ours(runs[0])


def test_values_in_the_file_take_precedence_over_peer_defaults(tmp_path):
    run = converted(SOURCE + "cliprange: 0.5\n", tmp_path, "trl", "grpo")  # GRPO's default epsilon is 0.2
    assert (ours(run)["loss.low"], ours(run)["loss.high"]) == (0.5, 0.5)


def test_empty_list_item_is_not_an_unknown_key(tmp_path):
    assert status(converted(A + "test_datasets: [{path: c/d}, {}]\n", tmp_path))["test_datasets[1]"] != "unknown"


def peer_files() -> list[Path]:
    return sorted(PEER_CONFIGS.glob("*/*.y*ml"))


@pytest.mark.slow
@pytest.mark.skipif(
    not peer_files(), reason="no configs of peers: neither $TUNE_PEER_CONFIGS nor ../shared/data/configs"
)
def test_real_peer_configs_convert_or_explain_why_not(tmp_path):
    for file in peer_files():
        values, method, processes = verb.read(file)
        peer = peer_of(values, file)
        assert peer == file.parent.name, file
        try:
            run = migrate(values, peer, method, RECIPES, processes)
        except NotConverted as reason:
            assert len(str(reason)) > 30, file
            continue
        missing = verb.check(run)
        assert {*missing} <= {"dataset.path", "reward", "teacher.path"}, file
        entries = run.entries()
        assert [entry.key for entry in entries] == [key for key, _ in leaves(values)], file
        assert not [
            entry
            for entry in entries
            if entry.status == "unknown" or not (entry.note or entry.ours or entry.status == "same by default")
        ], file


def test_pages_that_messages_name_have_these_sections():
    root = Path(__file__).parents[2]
    sources = "".join(file.read_text() for file in (*root.glob("tune/migrate/**/*.py"), root / "tune/cli/migrate.py"))
    named = {*re.findall(r"((?:docs|tests)/[\w/]+\.md)#([\w-]+)", sources)}
    assert len(named) >= 6
    for page, section in named:
        titles = re.findall(r"^#+ (.*)$", (root / page).read_text(), re.MULTILINE)
        assert section in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], (page, section)


SOURCE = "model_name_or_path: a/b\ndataset_name: c/d\n"
TORCHTUNE_RECIPE = """
model: {_component_: torchtune.models.llama3.llama3_8b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /m}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
"""


@pytest.mark.parametrize(
    ("peer", "method", "text", "expected"),
    [
        (
            "trl", "gkd", SOURCE + "teacher_model_name_or_path: a/c\n",
            {"on_policy.share": 0.5, "loss._component_": "tune.losses.JensenShannon", "loss.beta": 0.5,
             "on_policy.max_new_tokens": 128, "optimizer.lr": None},
        ),
        (
            "trl", None, SOURCE + "teacher_model_name_or_path: a/c\n",
            {"on_policy.share": 1.0, "loss._component_": "tune.losses.ReverseKL", "on_policy.max_new_tokens": 512},
        ),
        (
            "trl", "cpo", SOURCE + "loss_type: simpo\n",
            {"loss._component_": "tune.losses.SimPO", "loss.beta": 0.1, "loss.gamma": 0.5},
        ),
        ("trl", "cpo", SOURCE + "loss_type: sigmoid\ncpo_alpha: 0.3\n", {"loss.nll": 0.3, "loss.beta": 0.1}),
        ("trl", "ppo", SOURCE + "cliprange: 0.3\nnum_mini_batches: 4\n", {"loss.low": 0.3, "loss.high": 0.3}),
        ("trl", "sft", SOURCE + "completion_only_loss: true\nassistant_only_loss: false\n", {"dataset.train_on": None}),
        ("trl", "sft", SOURCE + "max_length: null\n", {"max_seq_len": None}),
        ("axolotl", None, A + "learning_rate: 1e-4\n", {"schedule.warmup": None}),  # 0.03 is the recipe's default
        ("axolotl", None, A + "learning_rate: 1e-4\nwarmup_steps: 0\n", {"schedule.warmup": 0}),
        ("axolotl", None, A + "rl: grpo\n", {"loss.low": 0.2, "loss.high": 0.2}),
        ("axolotl", None, A + "rl: simpo\n", {"loss.beta": 0.1, "loss.gamma": 0.5}),
        (
            "torchtune", None, TORCHTUNE_RECIPE + "optimizer: {_component_: torch.optim.SGD, lr: 0.1}\n",
            {"optimizer.weight_decay": None},
        ),
        (
            "torchtune", None, TORCHTUNE_RECIPE + "teacher_checkpointer: {checkpoint_dir: /t}\n",
            {"loss.cross_entropy": 0.5},
        ),
        ("llama_factory", None, L + "stage: dpo\npref_loss: simpo\n", {"loss.beta": 0.1, "loss.gamma": 0.5}),
        ("llama_factory", None, "model: a/b\ntrain_dataset: c/d\npeft_config: {name: lora, r: 32}\n",
         {"adapter.rank": 32, "adapter.alpha": 16, "adapter.dropout": 0.05, "optimizer.weight_decay": 0.01,
          "seed": 42}),
        ("torchtune", None, TORCHTUNE_RECIPE.replace("llama3_8b", "lora_llama3_8b"),
         {"adapter.rank": 8, "adapter.alpha": 16}),
        ("torchtune", None, TORCHTUNE_RECIPE.replace("llama3_8b", "lora_llama3_8b, lora_rank: 64"),
         {"adapter.rank": 64, "adapter.alpha": 16}),
        ("torchtune", None, TORCHTUNE_RECIPE + "optimizer: {_component_: torch.optim.AdamW}\n",
         {"optimizer.lr": 0.001}),
        ("axolotl", None, A + "pretraining_dataset: [{path: c/d}]\nmax_steps: 9\nexcess_length_strategy: null\n",
         {"dataset.streaming": True, "dataset.too_long": "split"}),
        ("llama_factory", None, L + "stage: ppo\n", {"kl": 0.2, "value_weight": 0.1, "sampling.top_p": 0.7}),
        ("trl", "sft", SOURCE, {"dataset.too_long": "truncate"}),  # texts, too
        ("trl", "sft", SOURCE + "packing: true\npacking_strategy: bfd_split\n", {"dataset.too_long": "split"}),
        ("trl", "sft", SOURCE + "packing_strategy: wrapped\n", {"dataset.too_long": "truncate"}),
        ("trl", "ppo", SOURCE + "total_episodes: 800\n", {"prompts_per_step": 8, "max_steps": 100}),
        ("torchtune", None, TORCHTUNE_RECIPE.replace("alpaca", "wikitext") + "tokenizer: {max_seq_len: 9}\n",
         {"dataset.too_long": "truncate"}),
        ("torchtune", None, TORCHTUNE_RECIPE + "optimizer: {_component_: torch.optim.RMSprop, eps: 0.1}\n",
         {"optimizer.eps": 0.1, "optimizer.lr": 0.01}),
        ("llama_factory", None, L + "stage: sft\nproject: mine\n", {"trackers": None}),  # for Trackio
    ],
)  # fmt: skip
def test_defaults_of_peers_apply_when_the_file_is_silent(peer, method, text, expected, tmp_path):
    """None means that the recipe's default is the same."""
    run = converted(text, tmp_path, peer, method)
    verb.check(run)
    assert {key: ours(run).get(key) for key in expected} == expected


def test_torchtune_datasets_train_on_what_their_builders_select(tmp_path):
    sources = "{_component_: torchtune.datasets.alpaca_dataset}, {_component_: torchtune.datasets.samsum_dataset}"
    off = "{_component_: torchtune.datasets.alpaca_cleaned_dataset, train_on_input: false}"
    text = TORCHTUNE_RECIPE.replace("{_component_: torchtune.datasets.alpaca_dataset}", f"[{sources}, {off}]")
    parts = [*ours(converted(text, tmp_path))["dataset.sources"].values()]
    assert [part.get("train_on", "assistant") for part in parts] == ["all", "assistant", "assistant"]


@pytest.mark.parametrize(("method", "value"), [("rloo", None), ("grpo", None), ("ppo", "./r")])
def test_trl_reward_model_becomes_a_value_model_only_for_ppo(method, value, tmp_path):
    key = "reward_model_path" if method == "ppo" else "reward_model_name_or_path"
    run = converted(SOURCE + f"{key}: ./r\n", tmp_path, "trl", method)
    assert (ours(run)["reward"], ours(run).get("value.path")) == (JUDGE, value)
    assert status(run)[key] == "converted"


@pytest.mark.parametrize(
    ("peer", "method", "text", "dropout"),
    [
        ("trl", "dpo", SOURCE + "use_peft: true\n", 0),
        ("trl", "dpo", SOURCE + "use_peft: true\ndisable_dropout: false\n", 0.05),
        ("trl", "kto", SOURCE + "use_peft: true\nlora_dropout: 0.1\n", 0),
        ("trl", "sft", SOURCE + "use_peft: true\nlora_dropout: 0.1\n", 0.1),
        ("trl", "grpo", SOURCE + "use_peft: true\n", 0.05),
        ("llama_factory", None, L + "stage: dpo\nlora_dropout: 0.1\n", 0),
        ("llama_factory", None, L + "stage: rm\nlora_dropout: 0.1\n", 0.1),
        ("axolotl", None, A + "rl: orpo\nadapter: lora\nlora_dropout: 0.1\n", 0),
        ("axolotl", None, A + "adapter: lora\nlora_dropout: 0.1\n", 0.1),
    ],
)
def test_dropout_disabled_by_the_trainer(peer, method, text, dropout, tmp_path):
    """TRL's disable_dropout is on for preferences and rewards, and affects the adapter."""
    assert ours(converted(text, tmp_path, peer, method))["adapter.dropout"] == dropout


def test_lost_peer_defaults_are_reported(tmp_path):
    run = converted(SOURCE + "loss_type: simpo\n", tmp_path, "trl", "cpo")
    assert [(entry.key, entry.value) for entry in run.lost()] == [("cpo_alpha", 1.0), ("max_length", 1024)]
    assert {entry.key for entry in converted(SOURCE, tmp_path, "trl", "grpo").lost()} == {"scale_rewards"}
    null = converted(SOURCE + "max_length: null\n", tmp_path, "trl", "sft")
    assert status(null)["max_length"] == "no counterpart"
    with pytest.raises(NotConverted, match="rso"):
        converted(TORCHTUNE_RECIPE + "loss: {_component_: torchtune.rlhf.loss.RSOLoss}\n", tmp_path, "torchtune")


def test_resolvers_of_another_persons_file_stay_as_written(monkeypatch):
    """They would read the environment of this machine; references to other keys are resolved."""
    monkeypatch.setenv("MINE", "value")
    values = {"a": "http://host/${oc.env:MINE}", "b": {"c": ["${a}", "${d}"]}, "d": 1}
    assert resolved(values) == {"a": values["a"], "b": {"c": [values["a"], 1]}, "d": 1}
