"""All pairs of a layout and another setting: three steps on two processes match one process."""

import json
import random
from collections import defaultdict

import pytest
from helpers import curve_steps, figures_of, run_processes, save_checkpoint
from recipes.test_pairs_of_settings import FACTORS, covering
from recipes.test_tensor_parallel import RUN_VARIANTS
from update_in_backward import in_backward

STAGES = ["parallel.pp=2", "micro_batch_size=2"]
LAYOUTS = {
    "ZeRO 0": ["parallel.zero_stage=0", "micro_batch_size=2"],
    "ZeRO 1": ["parallel.zero_stage=1", "micro_batch_size=2"],
    "HSDP": ["parallel.dp_replicate=2", "parallel.reduce_every_micro_batch=false", "micro_batch_size=2"],
    "tp": ["parallel.tp=2", "micro_batch_size=4"],
    "tp, whole head": ["parallel.tp=2", "parallel.loss_parallel=false", "micro_batch_size=4"],
    "cp": ["parallel.cp=2", "micro_batch_size=4"],
    "ep": ["parallel.ep=2", "micro_batch_size=2"],
    "interleaved": [*STAGES, "parallel.pp_schedule=interleaved"],
    "zero bubble": [*STAGES, "parallel.pp_schedule=zero_bubble"],
}
RECIPES = {"all": "full_finetune", "DPO": "preference_finetune"}
TRAINED = ("all", "lora", "experts", "DPO")
OPTIMIZERS = ("AdamW", "Adafactor", "Muon", "AdamW8bit")
WHAT = {
    "trained": {name: FACTORS["trained"][name] for name in TRAINED},
    "quantization": {name: FACTORS["quantization"][name] for name in ("null", "nf4")},
    "optimizer": {name: FACTORS["optimizer"][name] for name in OPTIMIZERS},
    "packed": FACTORS["packed"],
}
HOW = {
    "layout": LAYOUTS,
    "checkpointing": FACTORS["checkpointing"],
    "cpu_offload": FACTORS["cpu_offload"],
    "in_backward": {"false": ["max_grad_norm=null"], "true": []},  # the changed copy lacks this setting
}
PIPELINES = ("interleaved", "zero bubble")
REFUSED = [
    {"trained": "all", "quantization": "nf4"},
    {"cpu_offload": "true", "in_backward": "true"},
    *({"layout": layout, "trained": "DPO"} for layout in PIPELINES),
    *({"layout": layout, "in_backward": "true"} for layout in PIPELINES),
    {"layout": "zero bubble", "checkpointing": "selective"},
    *({"layout": layout, "optimizer": "Muon"} for layout in ("tp", "tp, whole head")),
]


@pytest.mark.weekly
def test_two_processes_match_one(chats, pairs, tmp_path):
    shape = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256}
    dense = save_checkpoint(tmp_path / "dense", **shape)
    experts = save_checkpoint(
        tmp_path / "experts", "Qwen3MoeConfig", **shape, num_experts=4, num_experts_per_tok=2, head_dim=32,
        moe_intermediate_size=128,
    )  # fmt: skip
    common = [
        "max_seq_len=128", "device=cpu", "compute.dtype=fp32", "global_batch_size=8", f"max_steps={curve_steps()}",
        "epochs=6", "optimizer.lr=1e-3", "schedule.warmup=0", "checkpointer.every=null",
    ]  # fmt: skip
    alone, shared, expected = defaultdict(dict), defaultdict(dict), {}
    for row in covering(random.Random(2), WHAT | HOW, REFUSED):
        recipe = RECIPES.get(row["trained"], "lora_finetune")
        recipe_of_two = "pipeline_finetune" if row["layout"] in PIPELINES else recipe
        if row["in_backward"] == "true":
            recipe_of_two = in_backward(recipe, tmp_path / "changed")
        mixture = row["trained"] == "experts" or row["layout"] == "ep"
        plain = [f"model.path={experts if mixture else dense}"]
        plain += [f"dataset.path={pairs if row['trained'] == 'DPO' else chats}"]
        plain += [setting for name in WHAT for setting in WHAT[name][row[name]]]
        name = ", ".join(row.values())
        expected[name] = ", ".join([*(row[factor] for factor in WHAT), "experts" if mixture else "dense"])
        alone[recipe][expected[name]] = [*plain, "micro_batch_size=8", "max_grad_norm=null"]
        shared[recipe_of_two][name] = plain + [setting for factor in HOW for setting in HOW[factor][row[factor]]]
        if row["in_backward"] == "true":  # which allows one backward pass per step
            shared[recipe_of_two][name].append(f"micro_batch_size={8 if row['layout'].startswith(('tp', 'cp')) else 4}")

    for folder, runs, processes in (("alone", alone, 1), ("two", shared, 2)):
        for recipe, variants in runs.items():
            arguments = [str(tmp_path / folder), json.dumps(common), json.dumps(variants)]
            run_processes(RUN_VARIANTS, processes, recipe, *arguments)
    for name, one in expected.items():
        tolerance = 1e-3 if "Muon" in name else 1e-5  # Muon scales the smallest directions of an update up, in bf16
        of_one = figures_of(tmp_path / "alone" / one)
        # Rewards are differences of log-probs, so they are compared with 1.
        assert figures_of(tmp_path / "two" / name) == pytest.approx(of_one, rel=tolerance, abs=tolerance), name
