"""Runs on weighted answers, each as seen: one curve in every layout, which matches a formula and separate rows."""

import json
from pathlib import Path

import full_finetune
import lora_finetune
import pipeline_finetune
import pytest
import torch
import torch.nn.functional as F
from helpers import WORDS, run_processes
from reasoning import ask, think

from tune import config

transformers = pytest.importorskip("transformers")

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
RECIPES = {"full_finetune": full_finetune, "lora_finetune": lora_finetune, "pipeline_finetune": pipeline_finetune}


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """12 conversations of one to three answers with reasoning; the first answer has a weight."""
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    rows = []
    for number in range(12):
        words = WORDS[number % 7 :]
        messages = []
        for turn in range(1 + number % 3):
            weight = {"weight": 0.25 + number / 20} if not turn else {}
            messages += [
                ask(" ".join(words[turn : turn + 4])),
                think(words[turn + 5], " ".join(words[: turn + 2]), **weight),
            ]
        rows.append({"messages": messages})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def by_hand(talks):
    """A row per answer, which learns only that answer and ends with it. Rows of a conversation are a group."""
    file = talks.with_name("by_hand.jsonl")
    rows = []
    for number, line in enumerate(talks.read_text().splitlines()):
        messages = json.loads(line)["messages"]
        for index in range(1, len(messages), 2):
            earlier = [{**message, "weight": 0} for message in messages[:index]]
            rows.append({"messages": [*earlier, messages[index]], "group": number})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def common(thinking_checkpoint, talks):
    return [
        f"model.path={thinking_checkpoint}", f"dataset.path={talks}", f"dataset.validation={talks}",
        "max_seq_len=256",
        "global_batch_size=4", "micro_batch_size=2", "compute.dtype=fp32", "device=cpu", "optimizer.lr=1e-3",
        "max_steps=3", "dataset.turns=as_seen", "checkpointer.every=null",
    ]  # fmt: skip


def curve(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [*((line["loss"], line["grad_norm"]) for line in lines), (lines[-1]["validation_loss"], 0.0)]


def assert_one_curve(steps, expected):
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


@pytest.fixture(scope="module")
def alone(common, tmp_path_factory):
    """Curves of one process, by recipe."""
    runs = tmp_path_factory.mktemp("alone")
    for recipe in ("full_finetune", "lora_finetune"):
        RECIPES[recipe].main(config.load(recipe, [*common, f"output_dir={runs / recipe}"]))
    return {recipe: curve(runs / recipe) for recipe in ("full_finetune", "lora_finetune")}


def weighted_mean(thinking_checkpoint, rows):
    """Return the loss of rows with one learned answer each, from transformers and the formula."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinking_checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(thinking_checkpoint)
    total = weight = 0.0
    for messages in (row["messages"] for row in rows):
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.apply_chat_template(messages, return_dict=False)[:-1]  # without the final newline
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
        answer, of_each = torch.tensor(tokens[len(prompt) :]), messages[-1].get("weight", 1)
        total += of_each * F.cross_entropy(logits, answer, reduction="sum").item()
        weight += of_each * len(answer)
    return total / weight


@pytest.mark.slow
def test_loss_is_the_weighted_mean_of_turns(alone, common, thinking_checkpoint, by_hand, tmp_path):
    all_rows = ["global_batch_size=12", "micro_batch_size=12", "max_steps=1"]
    full_finetune.main(config.load("full_finetune", [*common, *all_rows, f"output_dir={tmp_path / 'all'}"]))
    expected = weighted_mean(thinking_checkpoint, map(json.loads, by_hand.read_text().splitlines()))
    assert curve(tmp_path / "all")[0][0] == pytest.approx(expected, rel=1e-5)
    grouped = [
        *common, "dataset.turns=together", f"dataset.path={by_hand}",
        f"dataset.validation={by_hand}", "dataset.extra_columns=[group]", f"output_dir={tmp_path / 'by hand'}",
    ]  # fmt: skip
    full_finetune.main(config.load("full_finetune", grouped))
    assert_one_curve(curve(tmp_path / "by hand"), alone["full_finetune"])


LAYOUTS = {
    "FSDP": [],
    "one row at a time": ["micro_batch_size=1"],
    "cp": ["parallel.cp=2"],
    "tp": ["parallel.tp=2", "loss.chunk_tokens=5"],
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["full_finetune", pytest.param("lora_finetune", marks=pytest.mark.slow)])
def test_two_processes(recipe, alone, common, tmp_path):
    run_processes(RUN_VARIANTS, 2, recipe, str(tmp_path), json.dumps(common), json.dumps(LAYOUTS))
    for name in LAYOUTS:
        assert_one_curve(curve(tmp_path / name), alone[recipe])


@pytest.mark.slow
def test_two_stages(alone, common, tmp_path):
    variants = {"pp": ["parallel.pp=2"]}
    run_processes(RUN_VARIANTS, 2, "pipeline_finetune", str(tmp_path), json.dumps(common), json.dumps(variants))
    assert_one_curve(curve(tmp_path / "pp"), alone["full_finetune"])


@pytest.mark.slow
def test_packed_rows_weigh_the_same(common, tmp_path):
    """A step over a whole epoch has the same loss, packed or not."""
    for name, more in (("packed", ["packed=true", "micro_batch_size=1", "global_batch_size=64"]), ("plain", [])):
        settings = [*common, "global_batch_size=12", "max_steps=1", *more, f"output_dir={tmp_path / name}"]
        full_finetune.main(config.load("full_finetune", settings))
    assert_one_curve(curve(tmp_path / "packed"), curve(tmp_path / "plain"))
