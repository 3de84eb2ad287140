"""Each rule: where it fires, where it just does not, what it changes, and the page that lists all rules."""

import json
import re
import sysconfig
from pathlib import Path

import pytest
import torch
from helpers import slow_but
from omegaconf import OmegaConf

from tune import config
from tune.errors import TuneError
from tune.rules import RULES, Facts, Level, judge, unchecked

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "validate.md").read_text()
BY_ID = {rule.id: rule for rule in RULES}
FULL, LORA, PAIRS, GRPO = "full_finetune", "lora_finetune", "preference_finetune", "grpo"
BF16 = ["compute.dtype=bf16", "compute.master_dtype=bf16"]
STAGES, TWICE = "pipeline_finetune", ["parallel.pp=2", "parallel.pp_schedule=zero_bubble"]
SELECTIVE = ["compute.activation_checkpointing=selective"]
FLOAT8, NF4 = "model.float8=tensorwise", "model.quantization=nf4"
PPO, VALIDATED = ["reward=tune.evaluation.exact_match", "value.path=v"], ["dataset.validation=v"]
MOE = {"model_type": "qwen3_moe", "num_experts": 8, "router_aux_loss_coef": 0.01}

# The recipe, settings with which the rule fires, settings with which it does not, and other inputs of the rule.
CASES = {
    "rate-of-all-parameters": (FULL, ["optimizer.lr=1e-3"], ["optimizer.lr=1e-4"]),
    "rate-of-an-adapter": (LORA, ["optimizer.lr=1e-5"], ["optimizer.lr=2e-5"]),
    "rate-of-preferences": (PAIRS, ["optimizer.lr=1e-4"], ["optimizer.lr=1e-4", "adapter.rank=8"]),
    "rate-of-a-policy": (GRPO, ["optimizer.lr=1e-4"], ["optimizer.lr=1e-4", "adapter.rank=8"]),
    "rate-of-zero": (FULL, ["optimizer.lr=0"], ["optimizer.lr=1e-9"]),
    "rate-of-sgd": (FULL, ["optimizer._component_=torch.optim.SGD"], ["optimizer.lr=2e-5"]),
    "rate-of-adafactor": (FULL, ["optimizer._component_=tune.optimizers.Adafactor"], ["optimizer.lr=2e-5"]),
    "ratio-of-rates": (LORA, ["parameter_groups.lr_ratios={lora_b: 64}"], ["parameter_groups.lr_ratios={lora_b: 16}"]),
    "warm-up-of-the-whole-run": (FULL, ["schedule.warmup=9", "max_steps=8"], ["schedule.warmup=8", "max_steps=8"]),
    "updates-lost-in-bf16": (FULL, [*BF16, "optimizer.lr=1e-5"], [*BF16, "optimizer.lr=2e-5"]),
    "moments-stuck-in-bf16": (FULL, [*BF16, "optimizer.betas=[0.9,0.999]"], [*BF16, "optimizer.betas=[0.9,0.99]"]),
    "low-bit-states-of-bf16-shards": (
        FULL, [*BF16, "optimizer._component_=torchao.optim.AdamW8bit", "compute.cpu_offload=true"],
        [*BF16, "optimizer._component_=torchao.optim.AdamW8bit"],
    ),
    "computing-finer-than-the-weights": (
        FULL, ["compute.dtype=fp32", "compute.master_dtype=bf16"], ["compute.dtype=fp32"],
    ),
    "fp32-on-a-gpu": (FULL, ["compute.dtype=fp32"], ["compute.dtype=bf16"], {"device": "cuda"}),
    "bf16-on-a-cpu": (FULL, ["compute.dtype=bf16"], ["compute.dtype=fp32"]),
    "bf16-on-an-old-gpu": (
        FULL, ["compute.dtype=bf16"], ["compute.dtype=fp32"], {"device": "cuda", "capability": (7, 5)},
    ),
    "fp16-that-overflows": (
        FULL, ["compute.dtype=fp16"], ["compute.dtype=bf16"], {"model": {"model_type": "gemma3_text"}},
    ),
    "float8-on-an-old-gpu": (
        FULL, ["model.float8=rowwise"], ["model.float8=tensorwise"],
        {"device": "cuda", "capability": (8, 9)},
    ),
    "float8-by-rows-in-fp32": (
        FULL, ["model.float8=rowwise", "compute.dtype=fp32"], ["model.float8=rowwise"], {"device": "cuda"}
    ),
    "float8-that-is-slower": (
        FULL, ["model.float8=rowwise"], ["model.float8=rowwise", "compute.compile=true"], {"device": "cuda"}
    ),
    "two-types-on-mps": (FULL, [], BF16, {"device": "mps"}),
    "two-types-on-mps-reversed": (FULL, ["compute.dtype=fp32", "compute.master_dtype=bf16"], BF16, {"device": "mps"}),
    "offload-on-mps": (FULL, ["compute.cpu_offload=true"], [], {"device": "mps"}),
    "offload-from-host-to-host": (FULL, ["compute.activation_offload=true"], ["compute.cpu_offload=true"]),
    "recomputing-compiled-shares": (
        FULL,
        ["compute.compile=true", "parallel.ep=2", "compute.activation_checkpointing=selective"],
        ["compute.compile=true", "parallel.tp=2", "compute.activation_checkpointing=full"],
    ),
    "compiling-without-a-compiler": (FULL, ["compute.compile=true"], [], {"environ": {"CXX": "/nowhere/g++"}}),
    "compiling-without-a-c-compiler": (
        FULL, ["compute.compile=true"], ["compute.compile=false"], {"device": "cuda", "environ": {"CC": "/nowhere/gcc"}}
    ),
    "optimizer-without-a-compiler": (
        FULL, ["optimizer._component_=torchao.optim.AdamW8bit"], [], {"environ": {"CXX": "/nowhere/g++"}}
    ),
    "compiling-switched-off": (FULL, ["compute.compile=true"], [], {"environ": {"TORCH_COMPILE_DISABLE": "1"}}),
    "waiting-for-each-kernel": (
        FULL, [], None, {"device": "cuda", "environ": {"CUDA_LAUNCH_BLOCKING": "1"}}
    ),
    "shares-beyond-a-node": (FULL, ["parallel.tp=16"], ["parallel.tp=8"], {"device": "cuda", "processes": 16}),
    "little-patience": (FULL, ["parallel.timeout=5"], ["parallel.timeout=10"], {"processes": 2}),
    "best-of-one": (
        FULL,
        ["checkpointer.keep_best=validation_loss", "dataset.validation=v"],
        ["checkpointer.keep_best=validation_loss", "dataset.validation=v", "evaluate.every=9"],
    ),
    "best-of-nothing": (
        FULL,
        ["checkpointer.keep_best=validation_accuracy", "dataset.validation=v"],
        ["checkpointer.keep_best=validation_token_accuracy", "dataset.validation=v", "loss.accuracy=true"],
    ),
    "adapter-that-hardly-counts": (LORA, ["adapter.rank=256"], ["adapter.rank=128"]),
    "adapter-that-counts-too-much": (
        LORA, ["adapter.rank_stabilized=true", "adapter.alpha=128"], ["adapter.alpha=128"]
    ),
    "dropout-beside-a-reference": (
        PAIRS,
        ["adapter.rank=8", "adapter.dropout=0.1"],
        ["adapter.rank=8", "adapter.dropout=0.1", "loss._component_=tune.losses.SimPO"],
    ),
    "dropout-beside-a-sampler": (GRPO, ["adapter.rank=8", "adapter.dropout=0.1"], ["adapter.rank=8"]),
    "updates-without-a-clip": (GRPO, ["updates=2"], ["updates=2", "loss._component_=tune.losses.ClippedPolicy"]),
    "another-distribution": (GRPO, ["sampling.top_p=0.9"], ["sampling.temperature=0.9"]),
    "reference-of-nothing": (GRPO, ["reference={model}/."], ["reference={model}/.", "kl=0.1"]),
    "teacher-that-is-the-student": (
        "distill", ["teacher.path={model}/../model"], ["teacher.path={model}", "loss.cross_entropy=0.5"]
    ),
    "a-beta-that-holds": (PAIRS, ["loss.beta=5"], ["loss.beta=5", "loss._component_=tune.losses.SimPO"]),
    "answers-exchanged": (PAIRS, ["loss.label_smoothing=0.5"], ["loss.label_smoothing=0.4"]),
    "epochs-of-rewards": ("reward_finetune", ["epochs=2"], ["epochs=1"]),
    "merged-into-other-weights": (LORA, ["export.merge=true", "model.quantization=nf4"], ["export.merge=true"]),
    "experts-that-stay": (LORA, ["model.quantization=nf4"], [], {"model": MOE}),
    "adapted-router": (
        LORA, ["adapter.target_modules=[q_proj,gate]"], ["adapter.target_modules=[q_proj]"], {"model": MOE}
    ),
    "adapted-router-weight": (
        LORA, ["adapter.target_parameters=[experts.down_proj,gate.weight]"],
        ["adapter.target_parameters=[experts.down_proj]"], {"model": MOE},
    ),
    "unbalanced-experts": (FULL, [], ["model.router_loss=0.01"], {"model": MOE}),
    "packing-one-by-one": (
        LORA, ["packed=true", "model._component_=tune.models.hf"], ["model._component_=tune.models.hf"],
        {"model": {"model_type": "mamba", "state_size": 16}},
    ),
    "tied-halves": (
        LORA, ["adapter.modules_to_save=[embed_tokens]"], ["adapter.modules_to_save=[norm]"],
        {"model": {"tie_word_embeddings": True}},
    ),
    "gemma-without-bos": (
        LORA, [], ["tokenizer.chat_template=gemma"],
        {"model": {"model_type": "gemma3_text"}, "template": "{{ messages[0].content }}"},
    ),
    "thoughts-cut-short": (
        GRPO, [], ["sampling.max_new_tokens=2048"], {"template": "{% if thinking %}<think>{% endif %}"}
    ),
}  # fmt: skip
# Settings without effect, in the same form.
OF_NOTHING = {
    "max-turns-of-nothing": (GRPO, ["max_turns=3"], ["max_turns=3", "environment=rules.test_rules.Talk"]),
    "on-policy-max-new-tokens-of-nothing": (
        "distill", ["teacher.path=t", "on_policy.max_new_tokens=8"],
        ["teacher.path=t", "on_policy.max_new_tokens=8", "on_policy.share=0.5"],
    ),
    "evaluate-limit-of-nothing": (FULL, ["evaluate.limit=8"], ["evaluate.limit=8", "evaluate.tasks=[arc_easy]"]),
    "evaluate-general-limit-of-nothing": (
        FULL, ["evaluate.general_limit=1"], ["evaluate.general_limit=1", "evaluate.general=shipped"],
    ),
    "quantized-weights-of-no-adapter": (FULL, [NF4], [FLOAT8]),
    "evaluating-nothing": (FULL, ["evaluate.every=2"], ["evaluate.every=2", "evaluate.prompts=p"]),
    "evaluating-first-nothing": (FULL, ["evaluate.first=true"], [*VALIDATED, "evaluate.first=true"]),
}  # fmt: skip
# The recipe, conflicting settings, and similar settings that are valid.
TOGETHER = {
    "least-group-size": (GRPO, ["group_size=1"], ["group_size=2"]),
    "least-updates": (GRPO, ["updates=0"], ["updates=1"]),
    "least-dynamic-sampling": (GRPO, ["dynamic_sampling=-1"], ["dynamic_sampling=0"]),
    "least-kl": (GRPO, ["kl=-0.1"], ["kl=0"]),
    "least-value-weight": ("ppo_finetune", [*PPO, "value_weight=-1"], [*PPO, "value_weight=0"]),
    "least-value-clip": ("ppo_finetune", [*PPO, "value_clip=0"], [*PPO, "value_clip=0.1"]),
    "optimizer-that-does-not-work-here": (FULL, ["optimizer._component_=torch.optim.Muon"], []),
    "loss-of-whole-logits": (FULL, ["loss._component_=torch.nn.CrossEntropyLoss"], []),
    "loss-of-another-kind": (
        PAIRS, ["loss._component_=tune.losses.BradleyTerry"], ["loss._component_=tune.losses.IPO"]
    ),
    "head-of-another-recipe": (FULL, ["model.head=score"], ["model.head=tokens"]),
    "loss-of-other-rows": (
        PAIRS, ["loss._component_=tune.losses.KTO"], ["loss._component_=tune.losses.KTO", "dataset.kind=labelled"]
    ),
    "decay-of-more-than-a-weight": (
        FULL, ["optimizer.lr=2", "optimizer.weight_decay=1"], ["optimizer.lr=1", "optimizer.weight_decay=1"]
    ),
    "fp16-of-weights-in-bf16": (FULL, ["compute.dtype=fp16", "compute.master_dtype=bf16"], ["compute.dtype=fp16"]),
    "fp16-beside-pp": (STAGES, ["compute.dtype=fp16", "parallel.pp=2"], ["compute.dtype=fp16"]),
    "fp16-beside-ep": (FULL, ["compute.dtype=fp16", "parallel.ep=2"], ["compute.dtype=fp16"]),
    "selective-offload-of-eager-blocks": (
        FULL, [*SELECTIVE, "compute.activation_offload=true"],
        [*SELECTIVE, "compute.activation_offload=true", "compute.compile=true"],
    ),
    "two-backwards-of-compiled-blocks": (STAGES, [*TWICE, "compute.compile=true"], TWICE),
    "two-backwards-of-recomputed-blocks": (STAGES, [*TWICE, *SELECTIVE], TWICE),
    "quantized-weights-alone": (PAIRS, [NF4], [NF4, "adapter.rank=8"]),
    "float8-beside-nf4": (LORA, [FLOAT8, NF4], [FLOAT8]),
    "float8-beside-tp": (LORA, [FLOAT8, "parallel.tp=2"], [FLOAT8, "parallel.tp=1"]),
    "tasks-of-stages": (STAGES, ["parallel.pp=2", "evaluate.tasks=[a]"], ["evaluate.tasks=[a]"]),
    "general-data-of-stages": (STAGES, ["parallel.pp=2", "evaluate.general=shipped"], ["evaluate.general=shipped"]),
    "answers-of-stages": (STAGES, ["parallel.pp=2", "evaluate.prompts=p"], ["evaluate.prompts=p"]),
    "dropout-drawn-anew": (
        STAGES, ["parallel.pp=2", *SELECTIVE, "compute.compile=true", "adapter.dropout=0.1"],
        ["parallel.pp=2", *SELECTIVE, "adapter.dropout=0.1"],
    ),
    "value-of-many-outputs": ("ppo_finetune", [*PPO, "value.head=tokens"], PPO),
    "stored-predictions-of-new-answers": (
        "distill", ["teacher.path=t", "teacher.top_k=4", "on_policy.share=0.5"], ["teacher.path=t", "teacher.top_k=4"]
    ),
    "reference-that-is-not-there": (PAIRS, ["reference=precomputd"], ["reference=precomputed"]),
    "reference-of-a-loss-without": (
        PAIRS, ["loss._component_=tune.losses.SimPO", "reference={model}"], ["loss._component_=tune.losses.SimPO"]
    ),
    "adapter-that-stays-on": (PAIRS, ["reference=adapter_off"], ["reference=adapter_off", "adapter.rank=8"]),
    "no-reward": (GRPO, ["reward=null"], []),
    "environment-that-is-none": (GRPO, ["environment=tune.datasets.load"], ["environment=rules.test_rules.Talk"]),
    "patience-without-a-metric": (
        FULL, [*VALIDATED, "checkpointer.patience=2"],
        [*VALIDATED, "checkpointer.patience=2", "checkpointer.keep_best=validation_loss"],
    ),
    "best-of-a-few-rows": (
        FULL, [*VALIDATED, "checkpointer.keep_best=loss"], [*VALIDATED, "checkpointer.keep_best=validation_loss"]
    ),
    "best-validation-of-nothing": (
        FULL, ["checkpointer.keep_best=validation_loss"], [*VALIDATED, "checkpointer.keep_best=validation_loss"]
    ),
}  # fmt: skip
NEEDED = {
    "model.path": "{model}", "dataset.path": "d", "reward": "tune.evaluation.exact_match", "compute.dtype": "bf16",
}  # fmt: skip


class Talk:
    """An environment, recognized by its methods."""

    def start(self, row): ...

    def step(self, message): ...


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """Return a function that makes a rule's inputs for a recipe with settings, on a CPU without bf16 products."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)

    def facts(recipe, settings, model=None, template=None, environ=None, device="cpu", **machine):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model or {"model_type": "llama"}))
        if template:
            (folder / "chat_template.jinja").write_text(template)
        needed = {key: value for key, value in NEEDED.items() if key != "reward" or recipe == GRPO}
        arguments = [*(f"{key}={value}" for key, value in needed.items()), *settings]
        cfg, _ = config.read(
            recipe, [argument.format(model=folder) if "{model}" in argument else argument for argument in arguments]
        )
        defaults = config.read_file(config.find_config(recipe))
        return Facts(cfg, device, environ=environ or {}, defaults=defaults, **machine)

    return facts


@pytest.mark.parametrize("id", [*CASES, *OF_NOTHING])
def test_rule_fires_exactly_where_it_should(id, facts):
    recipe, wrong, right, *more = {**CASES, **OF_NOTHING}[id]
    reads = more[0] if more else {}
    finding = BY_ID[id].judge(facts(recipe, wrong, **reads))
    assert finding and finding.rule == id and finding.place == BY_ID[id].key
    assert "{}" not in finding.message and "None" not in finding.message
    if right is None:  # only the other inputs are wrong
        right, reads = wrong, {"device": reads["device"]}
    assert BY_ID[id].judge(facts(recipe, right, **reads)) is None


@pytest.mark.parametrize("id", slow_but([*CASES, *OF_NOTHING, *TOGETHER][::5], [*CASES, *OF_NOTHING, *TOGETHER]))
def test_arguments_of_a_component_of_your_own_are_its_own(id, facts):
    """Its argument of the same name may mean something else."""
    rule = BY_ID[id]
    recipe, wrong, _, *more = {**CASES, **OF_NOTHING, **TOGETHER}[id]
    group, _, name = str(rule.key).rpartition(".")
    run = facts(recipe, wrong, **(more[0] if more else {}))
    is_argument = name not in ("_component_", "path") and OmegaConf.select(run.cfg, f"{group}._component_")
    if not is_argument or not rule.when(run):
        return
    OmegaConf.update(run.cfg, f"{group}._component_", "mine.Own")
    assert rule.judge(run) is None


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RAdam"])
def test_schedule_free_optimizers_are_refused(name, facts):
    run = facts(FULL, [])
    OmegaConf.update(run.cfg, "optimizer._component_", f"schedulefree.{name}ScheduleFree")
    (finding,) = [finding for finding in judge(run) if finding.rule == "optimizer-that-does-not-work-here"]
    assert finding.level is Level.ERROR and f"schedulefree.{name}ScheduleFree" in finding.message


def test_rules_about_settings_that_a_copy_renamed_are_counted(facts):
    run = facts(FULL, [])
    assert unchecked(run, []) == (0, []) and unchecked(run, ["something_else"]) == (0, [])
    (one, first), (both, names) = unchecked(run, ["optimizer"]), unchecked(run, ["optimizer", "parallel"])
    assert first == ["optimizer"] and names == ["optimizer", "parallel"]
    assert 5 < one < both < len(RULES)


def test_learning_rate_too_high_for_an_adapter(tmp_path):
    for rate, expected in (("5", ["rate-of-all-parameters"]), ("1e-3", [])):
        cfg, _ = config.read(LORA, ["model.path=m", "dataset.path=d", f"optimizer.lr={rate}"])
        rules = [finding.rule for finding in judge(Facts(cfg)) if finding.place == "optimizer.lr"]
        assert rules == expected


@pytest.mark.parametrize("id", TOGETHER)
def test_conflicting_settings_are_reported(id, tmp_path):
    """Conflicts are reported under the responsible key when settings are read; similar valid settings are not."""
    rule = BY_ID[id]
    recipe, wrong, right = TOGETHER[id]
    (tmp_path / "config.json").write_text("{}")
    needed = {"model.path": str(tmp_path), "dataset.path": "d"}
    needed |= {"reward": "tune.evaluation.exact_match"} if recipe == GRPO else {}

    def command_line(settings):
        arguments = [*(f"{key}={value}" for key, value in needed.items()), *settings]
        return [setting.replace("{model}", str(tmp_path / ".")) for setting in arguments]

    defaults = config.read_file(config.find_config(recipe))
    facts = Facts(config.read(recipe, command_line(wrong))[0], defaults=defaults)
    assert rule.when(facts)
    with pytest.raises(TuneError, match=re.escape(f"{rule.place(facts)}: {rule.said(facts)}")):
        config.load(recipe, command_line(wrong))
    assert not rule.when(Facts(config.load(recipe, command_line(right)), defaults=defaults))


@pytest.mark.parametrize(
    ("recipe", "loss"),
    [(FULL, "tune.losses.BradleyTerry"), (FULL, "tune.losses.DPO"), ("reward_finetune", "tune.losses.ForwardKL")],
)
def test_loss_called_with_other_arguments(recipe, loss):
    """Also a loss that takes the same number of arguments."""
    with pytest.raises(TuneError) as caught:
        config.load(recipe, ["model.path=m", "dataset.path=d", f"loss._component_={loss}"])
    _, problem = str(caught.value).splitlines()
    assert problem.strip().startswith("loss._component_: ")


def test_bf16_is_fine_on_a_cpu_with_bf16_products(facts, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert BY_ID["bf16-on-a-cpu"].judge(facts(FULL, ["compute.dtype=bf16"])) is None


@pytest.mark.slow
def test_missing_compilers_for_triton_are_reported(facts, tmp_path, monkeypatch):
    """A compiler (CC, gcc, or clang) and Python's headers, checked only on this machine."""
    rule, environ = BY_ID["compiling-without-a-c-compiler"], {"PATH": str(tmp_path)}

    def said(**machine):
        finding = rule.judge(facts(FULL, ["compute.compile=true"], device="cuda", environ=environ, **machine))
        return finding.message if finding else ""

    assert "gcc or clang" in said() and "apt install gcc python3-dev" in said() and not said(is_here=False)
    (tmp_path / "clang").touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    assert str(tmp_path / "include" / "Python.h") in said()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    assert not said()


def test_learning_rate_of_the_reinforcement_example_is_not_called_high(facts):
    """Its reward rises at 5e-4; at 1e-3, the same model collapsed to one answer."""
    cases = [facts(GRPO, [f"optimizer.lr={rate}", "adapter.rank=16"]) for rate in (5e-4, 1e-3)]
    assert [bool(BY_ID["rate-of-a-policy"].judge(case)) for case in cases] == [False, True]


def test_beta_for_token_means_is_larger(facts):
    settings = ["loss.beta=5", "loss.length_normalized=true"]
    assert BY_ID["a-beta-that-holds"].judge(facts(PAIRS, settings)) is None


@pytest.mark.slow
def test_tied_weight_is_checked_under_all_its_names(facts):
    """Except the head of our own models, where it is an error with another remedy."""
    ours, theirs = [], ["model._component_=tune.models.hf"]
    named = [
        (ours, "embed_tokens", True), (ours, "model.embed_tokens", True), (ours, "embedding", True),
        (ours, "lm_head", False), (theirs, "lm_head", True), (theirs, "transformer.wte", True), (theirs, "norm", False),
    ]  # fmt: skip
    for settings, name, fires in named:
        run = facts(LORA, [*settings, f"adapter.modules_to_save=[{name}]"], model={"tie_word_embeddings": True})
        assert (BY_ID["tied-halves"].judge(run) is not None) == fires, (settings, name)


@pytest.mark.slow
def test_validation_accuracy_has_one_name_and_must_be_enabled(facts):
    named = [
        ("validation_token_accuracy", "true", False), ("validation_token_accuracy", "false", True),
        ("validation_accuracy", "true", True), ("validation_loss", "false", False),
        ("validation_loss/chats", "false", False),
    ]  # fmt: skip
    for best, accuracy, fires in named:
        settings = [*VALIDATED, f"checkpointer.keep_best={best}", f"loss.accuracy={accuracy}"]
        assert (BY_ID["best-of-nothing"].judge(facts(FULL, settings)) is not None) == fires, (best, accuracy)
    own = [*VALIDATED, "checkpointer.keep_best=validation_wer", "checkpointer.higher_is_better=false"]
    assert BY_ID["best-of-nothing"].judge(facts(FULL, own)) is None  # a copy may measure it


@pytest.mark.parametrize("name", ["gate.weight", "mlp.router.weight"])
def test_weight_of_a_router_is_known_by_each_of_its_names(name, facts):
    run = facts(LORA, [f"adapter.target_parameters=[{name}]"])
    assert BY_ID["adapted-router-weight"].judge(run) is not None


@pytest.mark.slow
@pytest.mark.parametrize("key", ["evaluate.every=2", "evaluate.first=true"])
def test_clock_of_nothing_is_a_warning_unless_anything_is_evaluated(key, facts):
    """A warning, since a copy may add its own measurements to the evaluator."""
    (finding,) = judge(facts(FULL, [key, "compute.dtype=fp32"]))
    assert finding.level is Level.WARNING and finding.place == key.partition("=")[0]
    for given in (
        "dataset.validation=v", "dataset.validation={{split: test}}", "dataset.validation_fraction=0.1",
        "evaluate.tasks=[arc_easy]", "evaluate.general=shipped", "dataset._component_=rules.test_rules.rows",
    ):  # fmt: skip
        assert judge(facts(FULL, [key, "compute.dtype=fp32", given.replace("{{", "{").replace("}}", "}")])) == [], given


def rows(tokenizer, path="", max_seq_len=1, packed=False):
    """A dataset of a copied recipe, which may have validation data."""


def test_language_model_determines_the_kind_of_a_composite_model(facts):
    text = {"model_type": "gemma3_text", "tie_word_embeddings": True}
    run = facts(FULL, [], model={"model_type": "gemma3", "tie_word_embeddings": False, "text_config": text})
    assert (run.model["model_type"], run.model["tie_word_embeddings"]) == ("gemma3_text", False)


def test_every_rule_has_a_test_case_and_a_source():
    tested = [*CASES, *OF_NOTHING, *TOGETHER, "layout-that-is-planned"]  # the last in tests/plan/test_layout.py
    assert sorted(tested) == sorted(rule.id for rule in RULES) and len(RULES) >= 80
    for rule in RULES:
        assert bool(rule.source) == (rule.id in CASES) and rule.since and rule.why, rule.id
        assert not rule.source or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", rule.source), rule.id
        assert (rule.changes is not None) == (rule.level is Level.CHANGED), rule.id


SHIPPED = [
    (file.stem, str(file)) for file in (ROOT / "configs").glob("*.yaml") if file.stem not in ("evaluate", "qlora")
]
SHIPPED += [("lora_finetune", "qlora")]
for page in (ROOT / "examples").rglob("README.md"):
    SHIPPED += re.findall(r"(\w+) --config (examples/\S+\.yaml)", page.read_text())


@pytest.mark.parametrize(("recipe", "file"), sorted(set(SHIPPED)))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_rule_fires_on_shipped_configs(recipe, file, device, facts, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = ["--config", file, *(["compute.dtype=fp32", "compute.master_dtype=fp32"] if device == "cpu" else [])]
    settings += ["teacher.path=t"] if recipe == "distill" else []
    settings += ["reward=tune.evaluation.exact_match"] if recipe == "ppo_finetune" else []
    for processes in (1, 8):
        assert judge(facts(recipe, settings, device=device, processes=processes)) == []


def test_rule_changes_the_setting_unless_it_is_strict(facts):
    run = facts(FULL, [], device="mps")
    (strict,) = judge(run, strict=True)
    assert strict.level is Level.ERROR and run("compute.dtype") == "bf16"
    (changed,) = judge(run)
    assert changed.level is Level.CHANGED and run("compute.dtype") == "fp32" and "compute.dtype=fp32" in changed.message
    assert judge(run) == []


def test_rules_page_lists_all_rules():
    rows = []
    for rule in RULES:
        key = f"`{rule.key}`"
        thread = f"[{rule.source}]({rule.link})" if rule.source else ""
        rows.append(f"| `{rule.id}` | {rule.level} | {key} | {rule.why} | {rule.since} | {thread} |")
    assert [line for line in PAGE.splitlines() if line.startswith("| `")] == rows
