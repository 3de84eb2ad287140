"""Each method has one curve on 1, 2 and 4 processes: FSDP, HSDP, TP, CP, micro-batches, packed or not. GRPO samples the
same tokens."""

import json
from pathlib import Path

import pytest
from helpers import curve_steps, of_training, results_of, run_processes
from recipes.test_grpo import requests, rows  # noqa: F401

pytestmark = pytest.mark.weekly

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
ADAPTER, OFF = "adapter.rank=4", "reference=adapter_off"


def loss(name, *overrides):
    rows = ["dataset.kind=labelled"] if name == "KTO" else []
    return [f"loss._component_=tune.losses.{name}", *rows, *overrides]


SAMPLED = [
    "dataset.path={requests}",
    "dataset.validation={requests}",
    "max_prompt_len=64",
    "reward=recipes.test_grpo.share_of_a",
    "epochs=20",
]
# Per recipe: its settings, with which a step has all rows, and its methods.
RECIPES = {
    "preference_finetune": (
        ["dataset.path={pairs}", "dataset.validation={pairs}", "max_seq_len=256", "global_batch_size=40"],
        {
            "DPO": [],
            **{name: loss(name) for name in ("SimPO", "ORPO", "KTO")},
            "DPO, the adapter off": [ADAPTER, OFF],
            "DPO, another reference": ["reference={tied}"],
        },
    ),
    "reward_finetune": (
        ["dataset.path={pairs}", "dataset.validation={pairs}", "max_seq_len=256", "global_batch_size=40"],
        {"reward": ["loss.center=0.01"], "reward, adapter": [ADAPTER]},
    ),
    "distill": (
        [
            "dataset.path={chats}",
            "dataset.validation={chats}",
            "max_seq_len=128",
            "global_batch_size=48",
            "teacher.path={tied}",
        ],
        {
            "forward": [],
            "reverse": loss("ReverseKL"),
            "Jensen-Shannon": loss("JensenShannon"),
            "top 20": ["teacher.top_k=20"],
            "on policy": loss("ReverseKL", "on_policy.share=0.6", "on_policy.max_new_tokens=12"),
        },
    ),
    "grpo": (
        [*SAMPLED, "prompts_per_step=4", "group_size=4", "sampling.max_new_tokens=8"],
        {
            "GRPO": [],
            "clipped": loss("ClippedPolicy", "updates=2", "mask_truncated=true", "sampling.stop_strings=[a]"),
            "GSPO": loss("GSPO", "updates=2"),
            "kl": [ADAPTER, OFF, "kl=0.1", "sampling.temperature=0.8"],
            "kl to another model": ["kl=0.1", "reference={tied}"],
            "dynamic": ["dynamic_sampling=2", "baseline=leave_one_out", "reward=recipes.test_grpo.odd_ones"],
            "environment": ["environment=recipes.test_grpo.Guess", "max_turns=3", "sampling.stop_strings=[a,e]"],
        },
    ),
    "ppo_finetune": (
        [*SAMPLED, "prompts_per_step=8", "sampling.max_new_tokens=8"],
        {"PPO": [], "PPO, adapter": [ADAPTER, OFF, "samples_per_prompt=2"]},
    ),
}
ALONE = "micro-batches of 1"
PACKED = ["packed=true"]
HSDP = ["parallel.dp_replicate=2", "parallel.dp_shard=2", "micro_batch_size=2"]
WAYS = {  # by the number of processes
    1: {ALONE: [], "micro-batches of 4": ["micro_batch_size=4"], "packed": PACKED},
    2: {"FSDP": ["micro_batch_size=4"]},
    4: {
        "HSDP": HSDP,
        "TP x FSDP": ["parallel.tp=2", "micro_batch_size=4"],
        "TP x CP": ["parallel.tp=2", "parallel.cp=2", "micro_batch_size=8"],
        "packed": [*PACKED, *HSDP],
    },
}
FEW = [(1, ALONE), (4, "TP x FSDP")]  # a recipe's first method runs in all ways, its other methods in these


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_curve(recipe, checkpoint, tied_checkpoint, pairs, chats, requests, tmp_path):  # noqa: F811
    settings, methods = RECIPES[recipe]
    data = {"pairs": pairs, "chats": chats, "requests": requests, "tied": tied_checkpoint}
    unformatted = [
        f"model.path={checkpoint}", "device=cpu", "compute.dtype=fp32", "micro_batch_size=1", "optimizer.lr=1e-4",
        "epochs=6", f"max_steps={curve_steps(2)}", "checkpointer.every=null", *settings,
    ]  # fmt: skip
    unformatted += ["teacher.dtype=fp32"] * (recipe == "distill")
    common = [setting.format(**data) if "{" in setting else setting for setting in unformatted]
    for processes, ways in WAYS.items():
        variants = {
            f"{method} - {way}": [setting.format(**data) for setting in (*overrides, *how)]
            for method, overrides in methods.items()
            for way, how in ways.items()
            if (processes, way) in FEW or method == next(iter(methods))
            if how[:1] != PACKED or "max_seq_len" in "".join(settings)  # sampled rows have no packed setting
        }
        folder = tmp_path / str(processes)
        run_processes(RUN_VARIANTS, processes, recipe, str(folder), json.dumps(common), json.dumps(variants))
    apart = dict.fromkeys(methods, 0.0)
    for folder in tmp_path.glob("*/*"):
        method = folder.name.partition(" - ")[0]
        plain = tmp_path / "1" / f"{method} - {ALONE}"
        curve, expected = logged(folder), logged(plain)
        assert len(curve) == len(expected) == curve_steps(2)
        assert len({step["loss"] for step in expected if "loss" in step}) > 1, (
            method
        )  # all groups of a step may be dead
        for one, other in zip(curve, expected, strict=True):
            assert of_training(one) == of_training(other), folder
            for name in results_of(other):
                if name == "rewards/accuracies" and abs(other["rewards/margins"]) < 1e-6:
                    continue  # rounding decides which of two equal rewards is larger
                # Positive and negative terms of a metric cancel; margins are sums over whole answers.
                least = 1.0 if name == "rewards/margins" else 0.2
                difference = abs(one[name] - other[name]) / max(least, abs(other[name]))
                apart[method] = max(apart[method], difference)
        if recipe == "grpo":
            assert [(row["sample"], row["tokens"]) for row in rows(folder)] == [
                (row["sample"], row["tokens"]) for row in rows(plain)
            ], folder
    print(apart)  # shown with -s or on failure
    assert max(apart.values()) < 1e-5
