"""The script of docs/plainest.md trains like the recipe."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from docs_reader import ROOT, Reader
from safetensors.torch import load_file

from tune.cli import main as tune


def test_plain_script_matches_the_recipe(
    checkpoint: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "plainest.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "plain.py").write_text(text, encoding="utf-8")
    with Reader(tmp_path, checkpoint, chats).at_work():
        monkeypatch.setattr(sys, "argv", ["plain.py", str(checkpoint), str(chats), "plain"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        runpy.run_path("plain.py", run_name="__main__")
        losses = [float(loss) for loss in re.findall(r"\| loss (\S+)", capsys.readouterr().out)]
        arguments = [
            f"model.path={checkpoint}",
            f"dataset.path={chats}",
            "device=cpu",
            "dtype=fp32",
            "optimizer.fused=false",
        ]
        tune(
            [
                "run",
                "full_finetune",
                *arguments,
                "max_seq_len=1024",
                "micro_batch_size=2",
                "output_dir=run",
                "schedule.min_ratio=0.0",
            ]
        )
    assert len(losses) == 3
    shown = [float(loss) for loss in re.findall(r"^step .*\| loss (\S+)", capsys.readouterr().out, flags=re.MULTILINE)]
    assert losses == shown
    ours, theirs = (load_file(tmp_path / f"{run}/model.safetensors") for run in ("plain", "run/model"))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
