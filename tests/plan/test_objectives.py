"""The memory of recipes that compare answers or models, against the storages of real steps, counted one by one."""

import importlib
import json
import random
from collections import defaultdict
from dataclasses import replace

import pytest
from helpers import WORDS, save_checkpoint
from models.test_families import SMALL, VARIANTS

from tune import config
from tune.devices import DEVICES
from tune.plan.planning import Job
from tune.plan.trace import Recorder
from tune.tokenizers import Tokenizer

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
    "KTO": ("preference_finetune", "labelled", ["loss._component_=tune.losses.KTO", "dataset.kind=labelled"]),
    "reward": ("reward_finetune", "pairs", []),
    "reward, adapter": ("reward_finetune", "pairs", ["adapter.rank=4"]),
    "teacher": ("distill", "text", TEACHER),
    "teacher, stored": ("distill", "text", [*TEACHER, "teacher.top_k=8"]),
}


def length_modulo(row, completion):
    return float(len(completion) % 7)


TRAINING = ["micro_batch_size=8", "prompts_per_step=2", "group_size=8"]
ROLLOUT = ["micro_batch_size=1", "prompts_per_step=16", "group_size=4"]
SAMPLED = {
    "training": TRAINING,
    "KL to another model": [*TRAINING, "kl=0.1", "reference={other}"],
    "KL to its base": [*TRAINING, "kl=0.1", "adapter.rank=4", "reference=adapter_off"],
    "rollout": ROLLOUT,
    "rollout in parts": ["micro_batch_size=1", "prompts_per_step=3", "group_size=16", "sampling.max_rows=40"],
}
FAMILIES = ["gemma3_text", "gpt_oss", "qwen3_5_text", "deepseek_v3", "mixtral-window"]


@pytest.fixture
def of_family(request, checkpoint, tmp_path):
    config_class, changes = VARIANTS[request.param]
    return save_checkpoint(tmp_path / "model", config_class, **SMALL | changes | {"vocab_size": 300})


@pytest.mark.parametrize("name", SAMPLED)
def test_peak_of_completions(name, checkpoint, tmp_path, monkeypatch):
    more = SAMPLED[name]
    if any("{other}" in each for each in more):
        more = [each.format(other=save_checkpoint(tmp_path / "other", num_hidden_layers=6)) for each in more]
    compare_completions(checkpoint, tmp_path, monkeypatch, more, is_rollout=more[0] == "micro_batch_size=1")


@pytest.mark.slow
@pytest.mark.parametrize("of_family", FAMILIES, indirect=True)
@pytest.mark.parametrize("more", [TRAINING, ROLLOUT], ids=["training", "rollout"])
def test_peak_of_completions_of_a_family(of_family, more, tmp_path, monkeypatch):
    # A delta net has its peak while prompts are read for the first time, when later layers have no cache yet.
    compare_completions(of_family, tmp_path, monkeypatch, more, rel=0.15 if more == ROLLOUT else 0.01)


@pytest.mark.parametrize("micro_batch_size", [4, 16])
def test_a_search_knows_what_groups_share(micro_batch_size, checkpoint):
    common = [f"model.path={checkpoint}", "dataset.path=x", "reward=plan.test_objectives.length_modulo"]
    sizes = ["group_size=4", "prompts_per_step=4", "max_prompt_len=400", f"micro_batch_size={micro_batch_size}"]
    job = Job(config.load("grpo", [*common, *sizes, "sampling.max_new_tokens=20", "sampling.max_rows=4"]), EXACT, 1)
    peaks = [job.plan(job.layout(), line).peak for line in (False, True)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def compare_completions(folder, tmp_path, monkeypatch, more, is_rollout=None, rel=0.05):
    """The peak of GRPO, where all prompts and all completions are as long as they may be."""
    draw, by_length, tokenizer = random.Random(0), defaultdict(list), Tokenizer(str(folder))
    for _ in range(64):
        text = " ".join(draw.sample(WORDS, k=12))
        by_length[len(tokenizer.encode(text))].append(text)
    length, texts = max(by_length.items(), key=lambda each: len(each[1]))
    rows = [json.dumps({"prompt": each}) + "\n" for each in texts]
    (tmp_path / "prompts.jsonl").write_text("".join(rows * 16))
    monkeypatch.setattr(Tokenizer, "stop_ids", frozenset())
    cfg = config.load("grpo", [
        f"model.path={folder}", f"dataset.path={tmp_path / 'prompts.jsonl'}", f"output_dir={tmp_path / 'run'}",
        f"max_prompt_len={length}", "sampling.max_new_tokens=40", "max_steps=2", "device=cpu", "dtype=fp32",
        "reward=plan.test_objectives.length_modulo", "checkpointer.async=false", *more,
    ])  # fmt: skip
    job = Job(cfg, EXACT, 1)
    plan, recorder = job.plan(job.layout()), Recorder(EXACT, "fp32", False)
    recorder._cost = lambda *_: None
    with recorder:
        importlib.import_module("recipes.grpo").main.__wrapped__(cfg)
    print(plan.moment, plan.peak / recorder.peak - 1)  # shown by -s
    # Ids and places of the step before, which are not planned, are up to 4% with such a small model.
    assert plan.peak == pytest.approx(recorder.peak, rel=rel), plan.peak / recorder.peak - 1
    assert is_rollout is None or (plan.moment == "rollout") == is_rollout


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
    job = Job(cfg, EXACT, 1)
    plan, recorder = job.plan(job.layout()), Recorder(EXACT, "fp32", False)
    recorder._cost = lambda *_: None
    with recorder:
        importlib.import_module(f"recipes.{recipe}").main.__wrapped__(cfg)
    assert plan.peak == pytest.approx(recorder.peak, rel=0.03), plan.peak / recorder.peak - 1
