"""The scripts of docs/components.md for your own training loop run unchanged."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from tune.checkpointers import load_model
from tune.optimizers import cosine

PAGE = (Path(__file__).parents[2] / "docs" / "components.md").read_text(encoding="utf-8")


def script(heading):
    return re.search(rf"\n## {heading}\n\n```python\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.mark.slow
def test_data_checkpoint_and_evaluation_scripts_run(checkpoint, chats, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, "SmolLM2-135M-Instruct")
    shutil.copyfile(chats, "chats.jsonl")
    model = load_model(str(checkpoint))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = {
        "hf_model": transformers.AutoModelForCausalLM.from_pretrained(checkpoint),
        "model": model, "optimizer": optimizer, "schedule": cosine(optimizer, 3), "generator": torch.Generator(),
        "steps": 3, "context_ids": [5, 6, 7], "continuation_ids": [8, 9],
    }  # fmt: skip
    for heading in ("Data", "Checkpoints", "Evaluation"):
        exec(script(heading), names)
    assert (names["sample"].labels != -100).any() and float(names["loss"].detach()) > 0
    assert names["start"] == 0 and (tmp_path / "checkpoints" / "step-00000003" / "state.json").exists()
