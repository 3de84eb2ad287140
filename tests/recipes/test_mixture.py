"""A recipe on several sources, from the command line to the loss of each source."""

import json

import full_finetune
import pytest
import torch
import torch.nn.functional as F

from tune import config
from tune.datasets import load
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
def test_mixture_of_sources_logs_the_loss_of_each(checkpoint, chats, tmp_path):
    lines = chats.read_text().splitlines(keepends=True)
    files = {"few": tmp_path / "few.jsonl", "many": tmp_path / "many.jsonl"}
    files["few"].write_text("".join(lines[:8]))
    files["many"].write_text("".join(lines[8:]))
    each = (f"{name}: {{path: {file}, validation: {file}, weight: 1}}" for name, file in files.items())
    run = tmp_path / "run"
    overrides = [
        f"model.path={checkpoint}", "dataset._component_=tune.datasets.mix", f"dataset.sources={{{', '.join(each)}}}",
        "compute.dtype=fp32", "device=cpu", "optimizer.lr=1e-2", "max_steps=2", f"output_dir={run}", "max_seq_len=128",
    ]  # fmt: skip
    full_finetune.main(config.load("full_finetune", overrides))

    data = json.loads((run / "data.json").read_text())
    assert {name: of["rows"] for name, of in data["epoch"].items()} == {"few": 40, "many": 40}
    assert data["sources"]["few"]["kept"] == 8

    reported = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    sums, counts = {}, {}
    for name, file in files.items():
        samples = load(Tokenizer(str(checkpoint)), str(file), max_seq_len=128).samples
        labels = [torch.from_numpy(sample.labels).long() for sample in samples]
        with torch.no_grad():
            logits = [model(torch.from_numpy(sample.tokens).long()[None]).logits[0] for sample in samples]
        sums[name] = F.cross_entropy(torch.cat(logits), torch.cat(labels), reduction="sum").item()
        counts[name] = int((torch.cat(labels) != -100).sum())
    for name in files:
        assert reported[f"validation_loss/{name}"] == pytest.approx(sums[name] / counts[name], rel=1e-5)
    assert reported["validation_loss"] == pytest.approx(sum(sums.values()) / sum(counts.values()), rel=1e-5)
    assert "on `few, many`" in (run / "model" / "README.md").read_text()
