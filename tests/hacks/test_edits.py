"""Edits that people make to a copied recipe: about as long as the idea, and everything around still works."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from copied import CHANGES, EDITS, EXTENDING, SAMPLED, TINY, Copied, assert_same, lines_of


class Edit(NamedTuple):
    """`guide` are the lines that the idea takes, `lines` those that it takes here."""

    recipe: str
    section: str
    guide: int
    lines: int
    settings: tuple[str, ...] = ()


CHAT = ("dataset.path=chats.jsonl",)
WEIGHTED = ("dataset.path=weighted.jsonl", "dataset.extra_columns=[weight]")
PAIRS = ("dataset.path=margins.jsonl", "dataset.ignore=[margin]")
MARGINS = ("dataset.path=margins.jsonl", "dataset.extra_columns=[margin]")
PROMPTS = ("dataset.path=prompts.jsonl", "reward=rewarding.length")

TABLE = {
    "3 average": Edit("full_finetune", "An average of the weights", 8, 30, (*CHAT, "ema_decay=0.5")),
    "4 two losses": Edit("full_finetune", "Two losses, each logged", 10, 12, CHAT),
    "5 frozen": Edit("full_finetune", "The first layers frozen", 4, 3, CHAT),
    "6 rates": Edit("full_finetune", "A learning rate for each layer", 6, 5, CHAT),
    "7 memory": Edit("full_finetune", "Rows in memory", 5, 4),
    "8 weights": Edit("full_finetune", "A weight for each row, or token", 8, 4, WEIGHTED),
    "9 exact match": Edit("lora_finetune", "An exact-match metric", 12, 12, (*CHAT, "ask_every=2", "good_enough=2")),
    "10 tracker": Edit("full_finetune", "A logger", 8, 13, CHAT),
    "11 module": Edit("full_finetune", "A module and weights of your own", 10, 38, CHAT),
    "13 noise": Edit("full_finetune", "Noise on the embeddings", 6, 6, CHAT),
    "14 curriculum": Edit("full_finetune", "Short rows first", 6, 2, CHAT),
    "15 two loaders": Edit("full_finetune", "Two data loaders in turn", 10, 14, (*CHAT, "replay_every=2", "max_steps=2")),
    "16 no checkpointer": Edit("full_finetune", "No checkpointer", 6, 8, CHAT),
    "17 mixed objective": Edit("preference_finetune", "A supervised loss beside that of preferences", 6, 3, PAIRS),
    "18 ranks": Edit("grpo", "Advantages by rank", 8, 10, PROMPTS),
    "19 judge": Edit("grpo", "A second reward that is trained along", 20, 33, PROMPTS),
    "20 tokens": Edit("full_finetune", "Steps of a number of tokens", 12, 20, (*CHAT, "tokens_per_step=300")),
    "21 sam": Edit("full_finetune", "Sharpness-aware minimization", 14, 14, CHAT),
    "23 moving mixture": Edit("full_finetune", "A mixture that changes", 25, 24, (*CHAT, "other=other.jsonl")),
    "25 margin": Edit("preference_finetune", "A margin for each pair", 4, 2, MARGINS),
    "second validation": Edit("full_finetune", "A second validation set", 8, 6, CHAT),
}  # fmt: skip
WITHOUT_CHECKPOINTS = {"16 no checkpointer"}


def prepare(copied: Copied, name: str) -> list[str]:
    """Copy and change the recipe; the settings of a run."""
    edit = TABLE[name]
    copied.copy(edit.recipe, (CHANGES | EDITS | EXTENDING)[edit.section])
    tiny = SAMPLED if edit.recipe == "grpo" else TINY
    if name in WITHOUT_CHECKPOINTS:
        tiny = [each for each in tiny if not each.startswith("checkpointer.")]
    if name == "11 module":
        copied.save_tower()
    return [*tiny, "model.path=SmolLM2-135M-Instruct", *edit.settings]


@pytest.mark.parametrize("name", TABLE)
def test_lines(name: str) -> None:
    assert lines_of((CHANGES | EDITS | EXTENDING)[TABLE[name].section]) == TABLE[name].lines


@pytest.mark.parametrize("name", TABLE)
def test_runs(name: str, copied: Copied) -> None:
    settings = prepare(copied, name)
    assert copied.validate(*settings) == 0
    assert [step["step"] for step in copied.train("run", *settings) if step["step"]]
    assert [*(copied.folder / "run").glob("*/*.safetensors")] or name in ("11 module", "16 no checkpointer")


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_two_processes_follow_the_same_curve(name: str, copied: Copied) -> None:
    settings = prepare(copied, name)
    one, two = (copied.train(f"on_{count}", *settings, processes=count) for count in (1, 2))
    assert [step["loss"] for step in two if "loss" in step] == pytest.approx(
        [step["loss"] for step in one if "loss" in step], rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", TABLE.keys() - WITHOUT_CHECKPOINTS)
def test_continues_to_the_bit(name: str, processes: int, copied: Copied) -> None:
    settings = prepare(copied, name)
    copied.train("whole", *settings, processes=processes)
    where = copied.folder / "whole" / "checkpoints" / "step-00000002"
    copied.train("rest", *settings, f"resume={where}", processes=processes)
    assert_same(copied.exported("rest"), copied.exported("whole"))
