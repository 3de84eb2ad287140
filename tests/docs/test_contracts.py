"""docs/contracts.md, followed to the letter."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from docs_reader import BLOCK, ROOT, Reader
from helpers import run_processes, slow_but
from pytest import MonkeyPatch

from tune.datasets import Prompt
from tune.generation import Episode

PAGE = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
OWN, AFTER = PAGE.split("## Reward\n")


def values(name: str, folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


@pytest.mark.slow
@pytest.mark.parametrize("processes", slow_but([1], [1, 2]))
def test_one_script_replaces_every_component(processes: int, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """The script gives the same losses when run again and in two parts."""
    script = "\n\n".join(block for language, block in BLOCK.findall(OWN) if language == "python")
    (tmp_path / "own.py").write_text(script, encoding="utf-8")
    (tmp_path / "half.py").write_text(script.replace("train(total=4)", "train(total=2)"), encoding="utf-8")
    for folder, scripts in {"whole": ["own.py"], "again": ["own.py"], "parts": ["half.py", "own.py"]}.items():
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        for name in scripts:
            run_processes(tmp_path / name, processes)
    for name, number in (("output_norm", 2), ("lr", 4), ("loss", 4)):
        runs = [tmp_path / folder / "runs" / "own" for folder in ("whole", "again", "parts")]
        whole, again, parts = (values(name, run) for run in runs)
        assert len(whole) == number and whole == again == parts, name
    table = [line.split() for line in (tmp_path / "parts" / "losses.txt").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in table] == [*enumerate(whole, 1)]


def test_attributes_of_episodes_and_prompts() -> None:
    named = set(re.findall(r"`(episode|prompt)\.(\w+)`", AFTER))
    has = {("episode", field.name) for field in fields(Episode)} | {("prompt", field.name) for field in fields(Prompt)}
    assert has - named == {("episode", "magnitude")} and named <= has


@pytest.mark.slow
def test_reward_and_environment(checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path, checkpoint, chats)
    rows = [{"instruction": f"the cat {number}"} for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = " sampling.max_new_tokens=4 prompts_per_step=2 group_size=4 max_prompt_len=64"
    reader.follow(AFTER.replace("is_short\n```", f"is_short{few}\n```").replace("reward=null\n", f"reward=null{few}\n"))
    for run, name in ((1, "is_short"), (2, "environment")):
        (step,) = (tmp_path / "runs" / str(run) / "metrics.jsonl").read_text().splitlines()
        assert json.loads(step)[f"reward/{name}"] > 0
