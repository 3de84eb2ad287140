"""The memory of recipes that compare answers or models, against the storages of real steps, counted one by one."""

import importlib
import json
import random
from dataclasses import replace

import pytest
from helpers import save_checkpoint

from tune import config
from tune.devices import DEVICES
from tune.preflight.planning import Job
from tune.preflight.trace import Recorder

EXACT = replace(DEVICES["cpu"], reserve=0.0, reserve_share=0.0)
LENGTH, ROWS = 64, 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Answers that are longer than a row, by what a recipe reads."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    answers = [" ".join(draw.choices("abcdefgh", k=400)) for _ in range(2 * ROWS)]
    prompts = ["a", "a b"] * ROWS
    rows = {
        "pairs": [{"prompt": "a", "chosen": each, "rejected": each[::-1]} for each in answers],
        "labelled": [{"prompt": p, "completion": a, "label": p == "a"} for p, a in zip(prompts, answers, strict=True)],
        "text": [{"text": each} for each in answers],
    }
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return folder


TEACHER = ["teacher.path={other}", "teacher.dtype=fp32"]
CASES = {
    "one model": ("full_finetune", "text", []),
    "DPO": ("preference_finetune", "pairs", []),
    "DPO, its base": ("preference_finetune", "pairs", ["adapter.rank=4", "reference=adapter_off"]),
    "DPO, another model": ("preference_finetune", "pairs", ["reference={other}"]),
    "KTO": ("preference_finetune", "labelled", ["loss._component_=tune.losses.KTO"]),
    "reward": ("reward_finetune", "pairs", []),
    "reward, adapter": ("reward_finetune", "pairs", ["adapter.rank=4"]),
    "teacher": ("distill", "text", TEACHER),
    "teacher, stored": ("distill", "text", [*TEACHER, "teacher.top_k=8"]),
}


@pytest.mark.parametrize("name", CASES)
def test_peak_of_counted_storages(name, checkpoint, texts, tmp_path):
    recipe, rows, more = CASES[name]
    if any("{other}" in each for each in more):
        more = [each.format(other=save_checkpoint(tmp_path / "other", num_hidden_layers=6)) for each in more]
    cfg = config.load(recipe, [
        f"model.path={checkpoint}", f"dataset.path={texts / rows}.jsonl", f"output_dir={tmp_path / 'run'}",
        f"max_seq_len={LENGTH}", f"micro_batch_size={ROWS}", f"global_batch_size={ROWS}", "max_steps=2", "device=cpu",
        "dtype=fp32", "dataset.too_long=truncate", f"dataset.cache_dir={tmp_path}", "checkpointer.async=false", *more,
    ])  # fmt: skip
    job = Job(cfg, EXACT)
    plan, recorder = job.plan(job.layout(1)), Recorder(EXACT, "fp32", False)
    recorder._cost = lambda *_: None
    with recorder:
        importlib.import_module(f"recipes.{recipe}").main.__wrapped__(cfg)
    assert plan.peak == pytest.approx(recorder.peak, rel=0.03), plan.peak / recorder.peak - 1
