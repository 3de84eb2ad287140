"""Optional metrics: token accuracy, validation before the first step, every learning rate; and times."""

import json
import re
import time
from pathlib import Path

import full_finetune
import lora_finetune
import pytest
import torch

from tune import config
from tune.datasets import load
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def logged(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def predicted(source, chats):
    """Return transformers' mean loss and accuracy over the supervised tokens of all rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    losses, hits = [], []
    for sample in load(Tokenizer(str(source)), str(chats), max_seq_len=128).samples:
        labels = torch.from_numpy(sample.labels).long()
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens).long()[None]).logits[0]
        kept = labels != -100
        losses.append(torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="none"))
        hits.append((logits.argmax(dim=-1) == labels)[kept])
    return torch.cat(losses).mean().item(), torch.cat(hits).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [full_finetune, lora_finetune])
def test_optional_metrics_are_logged(recipe, checkpoint, chats, tmp_path):
    begin = time.time()
    settings = [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"dataset.validation={chats}", "device=cpu",
        "compute.dtype=fp32", "max_seq_len=128", "global_batch_size=48", "micro_batch_size=8", "epochs=3",
        "optimizer.lr=1e-2", "loss.accuracy=true", "evaluate.first=true", "schedule.warmup=1", f"output_dir={tmp_path}",
    ]  # fmt: skip
    patterns = {"embedding": 0.5} if recipe is full_finetune else {"lora_b": 0.5}
    settings.append(f"parameter_groups.lr_ratios={json.dumps(patterns)}")
    for _ in range(2):  # unsaved steps are trained again, and logged once
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recipe.checkpointers.Checkpointer, "save", lambda *_, **__: None)
            recipe.main(config.load(recipe.__name__, settings))
    zeroth, *steps = logged(tmp_path)
    loss, accuracy = predicted(checkpoint, chats)
    assert (zeroth["step"], [line["step"] for line in steps]) == (0, [1, 2, 3])
    assert zeroth["validation_loss"] == pytest.approx(loss, rel=1e-5)
    # A step's batch is the whole dataset, and its metrics come from the weights before the update.
    assert zeroth["validation_token_accuracy"] == steps[0]["token_accuracy"] == pytest.approx(accuracy, rel=1e-9)
    assert steps[-1]["validation_token_accuracy"] > accuracy and "validation_token_accuracy" not in steps[0]
    if recipe is full_finetune:
        loss, accuracy = predicted(tmp_path / "model", chats)
        assert steps[-1]["validation_token_accuracy"] == pytest.approx(accuracy, rel=1e-6) and accuracy > 0.01
    assert [line["epoch"] for line in steps] == [1, 2, 3]
    times = [line["time"] for line in (zeroth, *steps)]
    assert begin <= times[0] and times == sorted(times) and times[-1] <= time.time()
    documented = re.findall(r"^\| `([a-z_]+)", (ROOT / "docs" / "runs.md").read_text(), re.MULTILINE)
    assert {name.partition("/")[0] for line in (zeroth, *steps) for name in line} <= {"step", *documented}
    (pattern,) = patterns
    assert all(line[f"lr/{pattern}"] == pytest.approx(line["lr"] / 2) for line in steps)
    assert steps[1]["lr"] == pytest.approx(1e-2) and steps[0]["lr"] == pytest.approx(5e-3)


@pytest.mark.slow
def test_optional_metrics_are_off_by_default(checkpoint, chats, tmp_path):
    settings = [f"model.path={checkpoint}", f"dataset.path={chats}", "device=cpu", "compute.dtype=fp32", "max_steps=1"]
    full_finetune.main(config.load("full_finetune", [*settings, f"output_dir={tmp_path}"]))
    (line,) = logged(tmp_path)
    assert not {name for name in line if "accuracy" in name or "/" in name}
