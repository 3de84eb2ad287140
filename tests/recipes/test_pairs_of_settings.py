"""All pairs of setting values: `tune validate` refuses them, or two steps run.

If the settings only say how a step is computed, its numbers must match the plain way.
"""

import functools
import itertools
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from edited_recipes import run_edited, separated, with_edits
from helpers import save_checkpoint, weekly_but
from recipes.test_grpo import requests  # noqa: F401

from tune import config
from tune.distributed import LossScale
from tune.distributed.activations import wrap_forward
from tune.errors import TuneError

# Settings that change the numbers.
WHAT = {
    "trained": {
        "all": [],
        "all, int8": ["edit=int8", "edit=bf16"],
        "lora, int8": ["adapter.rank=4", "edit=int8"],
        "lora, float8": ["adapter.rank=4", "model.float8=rowwise_with_gw_hp"],
        "lora": ["adapter.rank=4"],
        "dora": ["adapter.dora=true"],
        "head": ["adapter.target_modules=[q_proj,lm_head,embed_tokens]"],
        "tokens": ["adapter.trainable_tokens=[2,30,7]", "adapter.modules_to_save=[norm]"],
        "distilled": ["adapter.rank=4", "loss.temperature=2", "loss.cross_entropy=0.3"],
        "experts": ["adapter.target_modules='.*(q_proj|experts.*)'"],
        "DPO": ["adapter.rank=4", "reference=adapter_off"],
        "KTO": ["adapter.rank=4", "loss._component_=tune.losses.KTO", "dataset.kind=labelled"],
    },
    "dropout": {"0": [], "0.2": ["adapter.dropout=0.2"]},
    "quantization": {
        "null": [],
        "nf4": ["model.quantization=nf4", "model.double_quantization=false"],
        "double": ["model.quantization=nf4"],
    },
    "optimizer": {
        "AdamW": [],
        "Adafactor": ["optimizer._component_=tune.optimizers.Adafactor"],
        "Muon": ["optimizer._component_=tune.optimizers.Muon"],
        "AdamW8bit": ["optimizer._component_=torchao.optim.AdamW8bit"],
    },
    "dtype": {
        "fp32": [],
        "bf16/fp32": ["compute.dtype=bf16"],
        "bf16": ["compute.dtype=bf16", "compute.master_dtype=bf16"],
        "fp16": ["compute.dtype=fp16"],
    },
    "packed": {"false": [], "true": ["packed=true"]},
}
# Settings that do not change the numbers; the first value of each is the plain way.
HOW = {
    "compile": {"false": [], "true": ["compute.compile=true"], "one": ["compute.compile=['*.1']"]},
    "checkpointing": {mode: [f"compute.activation_checkpointing={mode}"] for mode in ("none", "selective", "full")},
    "activation_offload": {"false": [], "true": ["compute.activation_offload=true"]},
    "cpu_offload": {"false": [], "true": ["compute.cpu_offload=true"]},
    "micro_batch": {"4": ["micro_batch_size=4"], "8": []},
}
# Other settings of a run, and its rows.
OTHERS = {
    "model": {"build": [], "hf": ["model._component_=tune.models.hf"]},
    "start": {"weights": [], "random": ["edit=random"]},
    "export": {"plain": [], "bf16": ["edit=bf16"], "merged": ["export.merge=true"]},
    "scale": {"alpha / r": [], "rsLoRA": ["adapter.rank_stabilized=true"]},
    "decay": {"matrices": [], "all": ["parameter_groups.decay_vectors=true", "optimizer.weight_decay=0.1"]},
    "schedule": {
        "cosine": [],
        **{value: [f"schedule._component_=tune.optimizers.{value}"] for value in ("linear", "warmup_stable_decay")},
        "constant": ["schedule._component_=tune.optimizers.constant"],
    },
    "warmup": {"0": [], "1": ["schedule.warmup=1"], "0.5": ["schedule.warmup=0.5"]},
    "clipping": {"null": [], "1.0": ["max_grad_norm=1.0"]},
    "chunk": {"null": [], "16": ["{chunk}=16"]},
    "accuracy": {"false": [], "true": ["loss.accuracy=true"]},
    "train_on": {
        value: [f"dataset.train_on={value}"] * (value != "assistant") for value in ("assistant", "all", "last")
    },
    "turns": {"together": [], "as_seen": ["dataset.turns=as_seen"]},
    "too_long": {
        "128": [],
        **{value: ["max_seq_len=96", f"dataset.too_long={value}"] for value in ("truncate", "drop")},
    },
    "bad rows": {"error": [], "skip": ["dataset.on_bad_row=skip"]},
    "rows": {"kept": ["epochs=3"], "streamed": ["dataset.streaming=true", "dataset.workers=1"]},
    "template": {"own": [], "chatml": ["tokenizer.chat_template=chatml"]},
    "validation": {
        "none": [],
        "fraction": ["dataset.validation_fraction=0.2"],
        "path": ["dataset.validation={data}", "evaluate.every=1", "evaluate.first=true"],
    },
    "evaluate": {
        "none": [],
        "prompts": ["evaluate.prompts={prompts}", "evaluate.max_new_tokens=3"],
        "general": ["evaluate.general=shipped"],
    },
    "keep_best": {"null": [], "loss": ["checkpointer.keep_best=validation_loss", "checkpointer.keep=1"]},
    "every": {"null": [], "1": ["checkpointer.every=1"]},
    "async": {"true": [], "false": ["checkpointer.async=false"]},
    "on_error": {"retry": [], "stop": ["checkpointer.on_error=stop"]},
    "on_nan": {value: [f"checkpointer.on_nan={value}"] * (value != "stop") for value in ("stop", "skip", "rollback")},
    "zero_stage": {"null": [], "1": ["parallel.zero_stage=1"], "0": ["parallel.zero_stage=0"]},
    "reduce": {"true": [], "false": ["parallel.reduce_every_micro_batch=false"]},
    "loss_parallel": {"true": [], "false": ["parallel.loss_parallel=false"]},
    "trace": {"null": [], "1": ["edit=trace"]},
    "resume": {"auto": [], "never": ["resume=never"]},
    "deterministic": {"false": [], "true": ["parallel.deterministic=true"]},
}
FACTORS = WHAT | HOW | OTHERS
PLAIN = {name: next(iter(values)) for name, values in HOW.items()}
NOT_ADAPTED = ("all", "all, int8")
ANSWERS = ("DPO", "KTO")
ADAPTED = [name for name in WHAT["trained"] if name not in NOT_ADAPTED]
OF_ADAPTERS = [
    {"dropout": ["0.2"]},
    {"quantization": ["nf4", "double"]},
    {"scale": ["rsLoRA"]},
    {"export": ["merged"]},
]
# Incompatible values, and the error of `tune validate` and the run for the first of each.
REFUSED = [
    ({"trained": NOT_ADAPTED, "dropout": ["0.2"]}, "adapter: is not a setting. It is one of"),
    ({"trained": NOT_ADAPTED, "scale": ["rsLoRA"]}, "adapter: is not a setting. It is one of"),
    ({"trained": NOT_ADAPTED, "export": ["merged"]}, "export: is not a setting"),
    ({"trained": ["distilled", *ANSWERS], "accuracy": ["true"]}, "loss.accuracy: "),
    (
        {"trained": ANSWERS, "train_on": ["all", "last"]},
        "rows train on whole answers: remove train_on",
    ),
    ({"trained": ANSWERS, "turns": ["as_seen"]}, "Remove turns=as_seen"),
    ({"turns": ["as_seen"], "train_on": ["all"]}, "turns: as_seen trains on answers"),
    (
        {"trained": ["KTO"], "rows": ["streamed"]},
        "streaming: labelled rows are compared with answers to other prompts",
    ),
    ({"trained": ["all, int8", "lora, int8"], "model": ["hf"]}, "model: only models of tune.models.build"),
    ({"trained": ["lora, int8"], "dropout": ["0.2"]}, "adapter.dropout: blocks.0"),
    (
        {"trained": ["lora, float8"], "quantization": ["nf4", "double"]},
        "model.quantization: it cannot be combined with model.float8",
    ),
    ({"trained": ["lora, int8"], "quantization": ["nf4", "double"]}, "already quantized"),
    ({"trained": ["lora, int8"], "dtype": ["bf16/fp32", "bf16", "fp16"]}, "is exported as float32"),
    ({"trained": ["all, int8"], "dtype": ["fp16"]}, "is exported as bfloat16"),
    (
        {"activation_offload": ["true"], "checkpointing": ["selective"], "compile": ["false", "one"]},
        "compute.activation_offload: with activation_checkpointing=selective",
    ),
    ({"start": ["random"], "model": ["hf"]}, "weights: tune.models.hf needs existing weights"),
    ({"trained": ["head"], "model": ["hf"], "dropout": ["0.2"]}, "does not support dropout. Set adapter.dropout=0"),
    ({"optimizer": ["AdamW8bit"], "cpu_offload": ["true"], "dtype": ["bf16"]}, "cannot update bf16 shards"),
    ({"keep_best": ["loss"], "validation": ["none"]}, "checkpointer.keep_best: the run has no validation data"),
    ({"rows": ["streamed"], "validation": ["fraction"]}, "validation_fraction: a stream cannot hold out rows"),
]


# What no user wants: adapters on random weights, another type of weights that are not exported whole, and quantized
# weights without an adapter, of which a rule warns.
POINTLESS = [
    {"trained": NOT_ADAPTED, "quantization": ["nf4", "double"]},
    {"trained": ADAPTED, "export": ["bf16"]},
    {"trained": ADAPTED, "start": ["random"]},
    *({"start": ["random"], **values} for values in OF_ADAPTERS),
    *({"export": ["bf16"], **values} for values in OF_ADAPTERS[:-1]),
]


def each_of(values):
    """Return a row for every combination of the values."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def covering(draw, factors, refused, tries=30, left_out=()):
    """Yield rows that cover every pair of values of two settings, unless it is refused.

    Each row covers as many remaining pairs as the best of `tries` greedy attempts. Its other values are the plain ones,
    which are cheapest.
    """
    values = {name: [(name, value) for value in factors[name]] for name in factors}

    def is_refused(row):
        return any(settings.items() <= row.items() for settings in refused)

    left = {
        frozenset(pair)
        for one, other in itertools.combinations(factors, 2)
        for pair in itertools.product(values[one], values[other])
        if not is_refused(dict(pair)) and not any(value in left_out for value in pair)
    }

    def greedy(pairs):
        row = dict(draw.choice(pairs))
        for name in draw.sample(sorted(factors.keys() - row), len(factors) - len(row)):
            if not (allowed := [value for value in values[name] if not is_refused(row | dict([value]))]):
                return greedy(pairs)  # of three values, only each two are compatible
            row |= [max(allowed, key=lambda value: sum(frozenset([value, item]) in left for item in row.items()))]
        return row

    while left:
        first = sorted(map(sorted, left))
        candidates = {
            frozenset(map(frozenset, itertools.combinations(row.items(), 2))): row
            for row in (greedy(first) for _ in range(tries))
        }
        pairs = max(candidates, key=lambda pairs: len(pairs & left))
        left -= pairs
        yield candidates[pairs]


def chunk_of(recipe):
    """Return the setting for the tokens whose logits exist at one time."""
    return "loss.chunk_tokens" if recipe in ("full_finetune", "lora_finetune", "distill") else "loss_chunk_tokens"


@pytest.fixture(scope="module")
def settings_of(chats, pairs, checkpoint, tmp_path_factory):
    """Function that returns the recipe and the settings of a row."""
    experts = save_checkpoint(
        tmp_path_factory.mktemp("experts"), "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, head_dim=16,
        moe_intermediate_size=32, num_hidden_layers=2,
    )  # fmt: skip
    teacher = save_checkpoint(tmp_path_factory.mktemp("teacher"), num_hidden_layers=2)
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("the cat\n")

    def settings_of(row):
        trained = row["trained"]
        recipe = "full_finetune" if trained in NOT_ADAPTED else "lora_finetune"
        recipe = "distill" if trained == "distilled" else "preference_finetune" if trained in ANSWERS else recipe
        data = pairs if trained in ANSWERS else chats
        settings = [
            f"model.path={experts if trained == 'experts' else checkpoint}", f"dataset.path={data}", "max_seq_len=128",
            "device=cpu", "compute.dtype=fp32", "global_batch_size=8", "micro_batch_size=8", "max_steps=2",
            "max_grad_norm=null", "optimizer.lr=1e-3", "schedule.warmup=0", "checkpointer.every=null",
            *(setting for name, value in row.items() for setting in FACTORS[name][value]),
            *[f"teacher.path={teacher}"] * (recipe == "distill"),
            f"output_dir={tmp_path_factory.mktemp('run')}",
        ]  # fmt: skip
        names = {"data": data, "prompts": prompts, "chunk": chunk_of(recipe)}
        return recipe, [setting.format(**names) if "{" in setting else setting for setting in settings]

    return settings_of


@pytest.fixture(scope="module")
def run(settings_of):
    """Function that runs two steps of a row and returns the loss and gradient norm of each."""

    def run(row):
        recipe, settings = settings_of(row)
        run_edited(recipe, settings)
        folder = Path(settings[-1].removeprefix("output_dir="))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["loss"], line["grad_norm"]) for line in lines if line["step"]]

    return run


@functools.cache
def rows():
    refused = [row for values in (*(each for each, _ in REFUSED), *POINTLESS) for row in each_of(values)]
    # Compiling all blocks is slow, and compiling one shows as much.
    drawn = [*covering(random.Random(2), FACTORS, refused, tries=4, left_out=[("compile", "true")])]
    compiled = {"compile": "true", "activation_offload": "true"}
    return [*drawn, *({**drawn[0], **compiled, "checkpointing": mode} for mode in HOW["checkpointing"])]


SHARES = 24


@pytest.mark.weekly
@pytest.mark.parametrize("share", range(SHARES))
def test_accepted_pairs_run_and_match_the_plain_way(share, run, settings_of, told, monkeypatch):
    monkeypatch.setattr(LossScale, "INITIAL", 2.0**6)  # two steps are too few to find the scale
    compile = torch.compile
    for number, row in enumerate(rows()[share::SHARES]):
        backend = "aot_eager" if row["compile"] == "true" else "eager"
        monkeypatch.setattr(torch, "compile", functools.partial(compile, backend=backend))
        recipe, settings = settings_of(row | {"activation_offload": "false"})
        assert number % 24 or told(*with_edits(recipe, settings)) == "", settings
        torch.compiler.reset()
        with monkeypatch.context() as patch:
            if row["activation_offload"] == "true":  # a CPU has nowhere to offload to, and the setting is refused
                offloading = functools.partial(wrap_forward, offload=True)
                module = sys.modules["tune.distributed.parallelize"]
                patch.setattr(module, "wrap_forward", lambda *args, way=offloading, **more: way(*args[:-1], **more))
            with torch.compiler.set_stance("default" if row["compile"] != "false" else "force_eager"):
                numbers = run(row | {"activation_offload": "false"})
        with torch.compiler.set_stance("force_eager"):  # torchao's optimizers compile themselves
            expected = run(row | PLAIN) if PLAIN.items() - row.items() else numbers
        tolerance = 3e-2 if row["dtype"] != "fp32" else 3e-3 if row["trained"] == "lora, float8" else 1e-4
        if "int8" in row["trained"] and row["optimizer"] == "Muon":  # Muon makes a last bit as large as an update,
            tolerance = max(tolerance, 3e-4)  # and a weight's last bit may select another of the 256 codes
        assert numbers == [pytest.approx(step, rel=tolerance) for step in expected] and len(numbers) == 2, settings


# The other recipes, with their settings from above (schedules are called alike) and their own.
SHARED = (
    *("dropout", "quantization", "optimizer", "dtype", "compile", "checkpointing", "cpu_offload", "model"),
    *("clipping", "every", "async", "on_nan", "zero_stage", "reduce", "loss_parallel", "trace"),
)
METHODS = {name: {factor: FACTORS[factor] for factor in SHARED} for name in ("grpo", "ppo_finetune", "reward_finetune")}
for name, factors in METHODS.items():
    names = ("all", "lora", "dora", "head", "tokens", "experts")
    factors["trained"] = {value: WHAT["trained"][value] for value in names}
    factors["optimizer"] = {value: WHAT["optimizer"][value] for value in ("AdamW", "Adafactor", "AdamW8bit")}
    factors["export"] = {value: OTHERS["export"][value] for value in ("plain", "merged")}
    factors["validation"] = {value: OTHERS["validation"][value] for value in ("none", "path")}
    if name == "reward_finetune":
        del factors["model"], factors["trained"]["head"]  # it scores, and models of transformers have no such head
        factors |= {factor: FACTORS[factor] for factor in ("packed", "micro_batch")}
        factors["center"] = {"0": [], "0.1": ["loss.center=0.1"]}
    else:
        del factors["trace"]  # a trace of sampling has a GiB
        factors |= {factor: FACTORS[factor] for factor in ("chunk", "evaluate")}
        factors["kl"] = {"0": ["kl=0"], "0.1": ["kl=0.1"], "base": ["kl=0.1", "reference=adapter_off"]}
        factors["updates"] = {"1": ["updates=1"], "2": ["updates=2", "loss._component_=tune.losses.ClippedPolicy"]}
        factors["sampling"] = {"1": [], "cold": ["sampling.temperature=0.5", "sampling.max_rows=2"]}
SAMPLED = [
    "dataset.path={requests}", "reward=recipes.test_grpo.share_of_a", "max_prompt_len=64", "sampling.max_new_tokens=6",
]  # fmt: skip
OF_A_STEP = {
    "grpo": [*SAMPLED, "prompts_per_step=2", "group_size=4"],
    "ppo_finetune": [*SAMPLED, "prompts_per_step=8"],
    "reward_finetune": ["dataset.path={pairs}", "max_seq_len=128", "global_batch_size=8"],
}
# Incompatible values in these recipes.
NOT_TOGETHER = [
    *({"trained": "all", **values} for values in ({"dropout": "0.2"}, {"export": "merged"}, {"kl": "base"})),
    *({"trained": "all", "quantization": value} for value in ("nf4", "double")),
    {"optimizer": "AdamW8bit", "cpu_offload": "true", "dtype": "bf16"},
    {"trained": "tokens", "kl": "base"},
    {"trained": "head", "model": "hf", "dropout": "0.2"},
]
# Recompiled for each shape: the step of torchao's optimizers, which the rows above cover, and models of transformers,
# which one row covers.
SLOW = [{"optimizer": "AdamW8bit", "compile": "one"}, {"model": "hf", "compile": "one"}]


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", METHODS)
def test_accepted_pairs_of_other_methods_run(
    recipe, checkpoint, pairs, requests, settings_of, told, tmp_path, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr(LossScale, "INITIAL", 2.0**6)
    factors, experts = METHODS[recipe], settings_of({"trained": "experts"})[1][0]
    compile, learned = torch.compile, []
    drawn = [*covering(random.Random(2), factors, [*NOT_TOGETHER, *SLOW], 4, [("compile", "true")])]
    if "model" in factors:
        drawn.append(drawn[0] | {"compile": "one", "model": "hf"})
    for number, row in enumerate(drawn):
        # The rows above compile the same code, with another backend too.
        monkeypatch.setattr(torch, "compile", functools.partial(compile, backend="eager"))
        torch.compiler.reset()
        settings = [
            experts if row["trained"] == "experts" else f"model.path={checkpoint}", "device=cpu", "compute.dtype=fp32",
            "micro_batch_size=8", "max_steps=2", "max_grad_norm=null", "optimizer.lr=1e-3", "schedule.warmup=0",
            "checkpointer.every=null", f"output_dir={tmp_path / str(number)}", *OF_A_STEP[recipe],
            *(setting for name, value in row.items() for setting in factors[name][value]),
        ]  # fmt: skip
        names = {"data": pairs if recipe == "reward_finetune" else requests, "pairs": pairs, "requests": requests}
        names |= {"prompts": requests, "chunk": chunk_of(recipe)}
        settings = [setting.format(**names) if "{" in setting else setting for setting in settings]
        assert number % 24 or told(*with_edits(recipe, settings)) == "", settings
        with torch.compiler.set_stance("default" if row["compile"] != "false" else "force_eager"):
            run_edited(recipe, settings)
        lines = [json.loads(line) for line in (tmp_path / str(number) / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["step"]]
        assert [line["step"] for line in steps] == [1, 2], settings
        assert all("loss" in line or line.get("dead_groups") == 2 for line in steps), settings  # a finite one
        learned.append(any("loss" in line for line in steps))
    assert sum(learned) > len(learned) / 2


USUAL = {name: next(iter(values)) for name, values in FACTORS.items()} | {"trained": "lora"}


@pytest.mark.parametrize(("values", "message"), weekly_but(REFUSED[::4], REFUSED))
def test_run_refuses(values, message, run):
    with pytest.raises(TuneError, match=re.escape(message)):
        run(USUAL | each_of(values)[0])


def wrong_on_any_machine(recipe, settings):
    """Return the errors in the settings alone, which is quick. `tune validate` finds them, too."""
    try:
        config.load(recipe, separated(settings)[1])
    except TuneError as error:
        return str(error)
    return ""


@pytest.mark.weekly
@pytest.mark.parametrize(("values", "message"), weekly_but(REFUSED[:2], REFUSED[::2]))  # as the run does
def test_tune_validate_refuses(values, message, settings_of, told):
    for number, row in enumerate(each_of(values)):
        recipe, settings = settings_of(USUAL | row)
        assert (number and message in wrong_on_any_machine(recipe, settings)) or message in told(
            *with_edits(recipe, settings)
        )
