"""Random combinations of a model, a method, settings and a layout: two processes match one.

Each run draws combinations for TUNE_TEST_SECONDS (30): the same ones, or others with TUNE_TEST_SEED (a number, or
`random`). TUNE_TEST_FIRST is the number of the first combination. A failure prints both, and the commands of both runs.
"""

import json
import os
import random
import re
import shlex
import shutil
import time
from pathlib import Path

import pytest
import torch
from helpers import results_of, run_processes, save_checkpoint, seed_of_run
from models.test_families import SMALL, VARIANTS
from recipes.test_grpo import requests  # noqa: F401
from recipes.test_pairs_of_settings import chunk_of
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("run_combinations.py")
SHAPE = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 128, "initializer_range": 0.05}
DENSE = (
    "llama", "llama-tied", "llama-biases", "llama-multi-query", "qwen2-windows", "qwen3-tied", "gemma2", "gemma3_text",
    "olmo2", "cohere2", "granite", "glm4", "phi3", "starcoder2", "qwen3_5_text",
)  # fmt: skip
EXPERTS = ("qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3", "granitemoe")
TOGETHER = 5
HF = "llama of transformers"
TEACHER = "llama-multi-head"
ADAPTED = {
    "lora": ["adapter.rank=4"],
    "dora": ["adapter.rank=4", "adapter.dora=true"],
    "pissa": ["adapter.rank=4", "adapter.init=pissa"],
    "head": ["adapter.rank=4", "adapter.target_modules=[q_proj,lm_head,embed_tokens]"],
    "tokens": ["adapter.rank=4", "adapter.trainable_tokens=[2,30,7]", "adapter.modules_to_save=[norm]"],
}
BOTH = {"all": [], **ADAPTED}
OFF = "reference=adapter_off"


def loss(name, *settings):
    rows = ["dataset.kind=labelled"] if name == "KTO" else []
    return [f"loss._component_=tune.losses.{name}", *rows, *settings]


ROWS = 8  # per step
OF_A_STEP = ["max_steps=2", f"global_batch_size={ROWS}"]
CHATS = ["dataset.path={chats}", *OF_A_STEP]
PAIRS = ["dataset.path={pairs}", *OF_A_STEP]
SAMPLED = [
    "dataset.path={requests}", "max_prompt_len=64", "reward=recipes.test_grpo.share_of_a", "sampling.max_new_tokens=6",
    "max_steps=2",
]  # fmt: skip
METHODS = {  # by recipe: its settings, trained parameters, and variants
    "full_finetune": (CHATS, {"all": []}, [[], ["loss.accuracy=true"]]),
    "lora_finetune": (CHATS, ADAPTED, [[], ["loss.accuracy=true"]]),
    "preference_finetune": (
        PAIRS, BOTH, [*map(loss, ("DPO", "IPO", "SimPO", "CPO", "ORPO", "KTO")), [OFF], loss("DPO", "loss.beta=1")],
    ),
    "reward_finetune": (PAIRS, BOTH, [[], ["loss.center=0.01"]]),
    "distill": (
        [*CHATS, "teacher.path={teacher}", "teacher.dtype=fp32"], BOTH,
        [
            [], loss("ReverseKL"), loss("JensenShannon"), ["teacher.top_k=20"],
            ["loss.cross_entropy=0.5", "loss.temperature=3"], ["on_policy.share=0.6", "on_policy.max_new_tokens=6"],
        ],
    ),
    "grpo": (
        [*SAMPLED, "prompts_per_step=4", "group_size=4"], {"all": [], "lora": ADAPTED["lora"]},
        [[], ["kl=0.1", OFF], ["kl=0.1"], loss("GSPO", "updates=2"), loss("ClippedPolicy", "updates=2")],
    ),
    "ppo_finetune": (
        [*SAMPLED, "prompts_per_step=8"], {"all": [], "lora": ADAPTED["lora"]},
        [["updates=1"], ["updates=2", "samples_per_prompt=2"]],
    ),
}  # fmt: skip
SAMPLING = ("grpo", "ppo_finetune")
STAGED = ("full_finetune", "lora_finetune")  # pipeline_finetune is these with stages
LAYOUTS = {
    "dp": [],
    "HSDP": ["parallel.dp_replicate=2"],
    "ep": ["parallel.ep=2"],
    "cp": ["parallel.cp=2"],
    "tp": ["parallel.tp=2"],
    "tp, whole head": ["parallel.tp=2", "parallel.loss_parallel=false"],
    "pp": ["parallel.pp=2"],
}
SCHEDULES = [[f"parallel.pp_schedule={schedule}"] for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")]
# The first value of each is drawn half of the time, otherwise any.
OF_LAYOUTS = [
    [[], *([f"parallel.zero_stage={stage}"] for stage in range(4))],
    [[], ["parallel.reduce_every_micro_batch=false"]],
]
SETTINGS = [
    [
        ["optimizer.eps=1e-6"], ["optimizer._component_=torch.optim.SGD"],
        ["optimizer._component_=tune.optimizers.Adafactor"], ["optimizer._component_=tune.optimizers.Muon"],
    ],
    [[], *([f"compute.activation_checkpointing={mode}"] for mode in ("selective", "full"))],
    [[], ["compute.cpu_offload=true"]],
    [[], ["{chunk}=16"]],
    [[], ["parameter_groups.decay_vectors=true", "optimizer.weight_decay=0.1"]],
    [["checkpointer.every=null"], ["checkpointer.every=1"]],
]  # fmt: skip
OF_ADAPTERS = [
    [[], ["adapter.dropout=0.2"]],
    [[], ["model.quantization=nf4"], ["model.quantization=nf4", "model.double_quantization=false"]],
    [[], ["export.merge=true"]],
]
OF_ROWS = [
    [["max_seq_len=128"], ["max_seq_len=93", "dataset.too_long=truncate"]],
    [[], ["packed=true"]],
    [["max_grad_norm=null"], ["max_grad_norm=0.3"]],
    [[], ["dataset.validation={validated}", "evaluate.every=1"]],
]
# Combinations that are always refused, and would be half of the draws.
NOT_TOGETHER = [
    ("parallel.pp=2", "parallel.zero_stage=3"),
    ("parallel.pp_schedule=zero_bubble", "compute.activation_checkpointing=selective"),
    ("parallel.pp_schedule=zero_bubble", "compute.activation_checkpointing=full"),
    ("parallel.tp=2", "optimizer._component_=tune.optimizers.Muon"),
]
# Errors that only two processes may give: about a layout's setting, or a documented limit.
REFUSALS = re.compile(r"parallel\.\w+|Muon needs whole matrices")


def draw_combination(seed, number):
    """Return the recipes for one and two processes, the model name, the common settings, and the settings of each."""
    draw = random.Random(f"{seed}, {number}")
    while True:
        combination = draw_settings(draw)
        if not any({*pair} <= {*combination[2], *combination[4]} for pair in NOT_TOGETHER):
            return combination


def draw_settings(draw):
    def one_of_each(factors):
        chosen = (values[0] if draw.random() < 0.5 else draw.choice(values) for values in factors)
        return [setting for group in chosen for setting in group]

    layout = draw.choice([*LAYOUTS])
    recipe = draw.choice(STAGED if layout == "pp" else [*METHODS])
    common, kinds, ways = METHODS[recipe]
    trained = draw.choice([*kinds])
    name = draw.choice(EXPERTS if layout == "ep" or draw.random() < 0.3 else (*DENSE, HF))
    settings = [*common, *kinds[trained], *draw.choice(ways), *one_of_each(SETTINGS)]
    settings += one_of_each([] if trained == "all" else OF_ADAPTERS)
    settings += one_of_each([] if recipe in SAMPLING else OF_ROWS)
    if trained == "all" and OFF in settings:
        settings.remove(OFF)
    if recipe == "reward_finetune":  # it has no logits
        settings = [setting for setting in settings if not setting.startswith("{chunk}")]
    rows = ROWS if layout.startswith(("cp", "tp")) else ROWS // 2  # per process, at most
    rows = draw.choice([count for count in (1, 2, 4, 8) if count <= rows])
    shared = [*LAYOUTS[layout], *(draw.choice(SCHEDULES) if layout == "pp" else []), *one_of_each(OF_LAYOUTS)]
    shared += [f"micro_batch_size={rows}", "parallel.timeout=5"]
    recipes = recipe, "pipeline_finetune" if layout == "pp" else recipe
    return recipes, name, settings, [f"micro_batch_size={ROWS}"], shared


def command(recipe, settings, processes):
    start = f"--nproc-per-node {processes} " if processes > 1 else ""
    return f"PYTHONPATH=tests tune run {start}{recipe} {shlex.join(settings)}"


def logged(folder):
    """Return the metrics of each step, without speed and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [results_of(line) for line in lines]


def exported(folder):
    """Return the exported tensors, by file and name."""
    files = [path for path in folder.rglob("*.safetensors") if "checkpoints" not in path.parts]
    return {(str(path.relative_to(folder)), name): tensor for path in files for name, tensor in load_file(path).items()}


def _is_rounding(step, name):
    return name.endswith("rewards/accuracies") and abs(step[name.replace("accuracies", "margins")]) < 1e-6


def difference(alone, two, start, is_rough):
    """Return how two runs differ, or "". `start` has the model's tensors before the first step."""
    tolerance = 1e-2 if is_rough else 1e-4
    one, other = logged(alone), logged(two)
    if [line.keys() for line in one] != [line.keys() for line in other] or not one:
        return f"logged: {[sorted(line) for line in one]}, on two processes {[sorted(line) for line in other]}"
    for before, after in zip(one, other, strict=True):
        # Rounding decides which of two equal rewards is larger, as before the first update.
        decided = {name for name in before if not _is_rounding(before, name)}
        for name, value in ((name, before[name]) for name in sorted(decided)):
            if after[name] != pytest.approx(value, rel=tolerance, abs=tolerance * (name != "grad_norm") / 20):
                return f"step {before['step']}: {name} is {value}, on two processes {after[name]}"
    ours, theirs = exported(alone), exported(two)
    if not ours or ours.keys() != theirs.keys():
        return f"exported: {sorted(ours.keys() ^ theirs.keys())}"
    learned = apart = 0.0
    for (file, name), tensor in ours.items():
        learned += (tensor.float() - start.get(name, torch.zeros(()))).square().sum().item()
        apart += (tensor.float() - theirs[file, name].float()).square().sum().item()
    if not apart**0.5 <= 10 * tolerance * learned**0.5:
        return f"exported: {apart**0.5:.3g} apart, of {learned**0.5:.3g} learned"
    return ""


class Combination:
    def __init__(self, seed, number, data, folder, again=False):
        """Draw a combination; `again` changes the order of the rows."""
        self.recipes, name, settings, alone, shared = draw_combination(seed, number)
        self.model, self.has_experts = model_of(name, folder), name in EXPERTS
        self.clips = self.recipes[0] in SAMPLING
        data = data | {"teacher": model_of(TEACHER, folder)}
        data["chunk"] = chunk_of(self.recipes[0])
        data["validated"] = data["pairs"] if "{pairs}" in str(settings) else data["chats"]
        common = [f"model.path={self.model}", *["model._component_=tune.models.hf"] * (name == HF)]
        common += ["device=cpu", "compute.dtype=fp32", "optimizer.lr=1e-3", "schedule.warmup=0", *["seed=1"] * again]
        common += [setting.format(**data) if "{" in setting else setting for setting in settings]
        self.folders = [folder / f"{number}-{processes}{'-again' * again}" for processes in (1, 2)]
        self.runs = [[*common, *alone], [*common, *shared]]

    def outcome(self):
        """Return "equal", "refused", "refused on two", or what is wrong."""
        files = [folder.with_suffix(".refused") for folder in self.folders]
        alone, two = (file.read_text() if file.exists() else "" for file in files)
        if alone and two:
            return "refused"
        if alone or two:
            return "refused on two" if REFUSALS.search(two) else f"refused: {alone}, on two processes: {two}"
        start = load_file(self.model / "model.safetensors")
        return difference(*self.folders, start, is_rough="Muon" in str(self.runs)) or "equal"

    def commands(self):
        runs = enumerate(zip(self.recipes, self.runs, self.folders, strict=True), 1)
        return "\n".join(
            command(recipe, [*settings, f"output_dir={folder}"], count) for count, (recipe, settings, folder) in runs
        )


def model_of(name, folder):
    path = folder / "models" / name.replace(" ", "_")
    if not path.exists():
        kind, changes = VARIANTS[name.partition(" ")[0]]
        layers = {"num_hidden_layers": 3 if "layer_types" in changes else 4}  # interleaved stages need 4
        save_checkpoint(path, kind, **SMALL | SHAPE | layers | changes)
    return path


def outcomes(combinations):
    """Return the outcomes of combinations, which share a process group, as starting one takes most of the time.

    If a run fails, each combination gets its own group.
    """
    try:
        for processes in (1, 2):
            at = processes - 1
            runs = [
                (combination.recipes[at], str(combination.folders[at]), combination.runs[at])
                for combination in combinations
            ]
            run_processes(SCRIPT, processes, json.dumps(runs))
    except AssertionError as error:
        if len(combinations) == 1:
            return [str(error)]
        for folder in (folder for combination in combinations for folder in combination.folders):
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_suffix(".refused").unlink(missing_ok=True)
        return [outcome for combination in combinations for outcome in outcomes([combination])]
    return [combination.outcome() for combination in combinations]


@pytest.mark.parametrize(
    "seconds", [pytest.param(30, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.weekly)]
)
def test_two_processes_match_one(seconds, chats, pairs, requests, tmp_path):  # noqa: F811
    data = {"chats": chats, "pairs": pairs, "requests": requests}
    seed, number = seed_of_run(), int(os.environ.get("TUNE_TEST_FIRST", 0))
    ends = time.monotonic() + float(os.environ.get("TUNE_TEST_SECONDS", seconds))
    counts, wrong = {"equal": 0, "refused": 0, "refused on two": 0}, []
    while time.monotonic() < ends or not (wrong or counts["equal"]):
        combinations = [Combination(seed, number + offset, data, tmp_path) for offset in range(TOGETHER)]
        for combination, outcome in zip(combinations, outcomes(combinations), strict=True):
            # If two experts of a token are equal up to rounding, the processes may choose different ones. Nor do they
            # always agree on whether a token whose ratio is at the border is clipped.
            if (combination.has_experts or combination.clips) and re.match(r"step \d+: |exported: .* apart", outcome):
                (outcome,) = outcomes([Combination(seed, number, data, tmp_path, again=True)])
            if outcome in counts:
                counts[outcome] += 1
            else:
                wrong.append(f"TUNE_TEST_SEED={seed} TUNE_TEST_FIRST={number}: {outcome}\n{combination.commands()}")
                print(wrong[-1], flush=True)
            number += 1
    print(f"TUNE_TEST_SEED={seed}: {counts}")
    assert not wrong, "\n\n".join(wrong)
