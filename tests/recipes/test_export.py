"""Other libraries load what a run exports."""

import json

import full_finetune
import pytest
import torch
import torch.nn.functional as F
from edited_recipes import run_edited
from torch.testing import assert_close

from tune import config
from tune.checkpointers import load_model
from tune.datasets import load
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["checkpoint", "tied_checkpoint"])
def source(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def run(source, chats, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    overrides = [
        f"model.path={source}", f"dataset.path={chats}", f"dataset.validation={chats}", "compute.dtype=fp32",
        "device=cpu", "optimizer.lr=1e-2", "max_steps=3", f"output_dir={folder}", "max_seq_len=128",
    ]  # fmt: skip
    full_finetune.main(config.load("full_finetune", overrides))
    return folder


@pytest.mark.slow
def test_transformers_computes_the_same_loss(run, source, chats):
    """The last validation loss came from the model in training; the export must give it in another library."""
    reported = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"]
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    loss_sum, count = 0.0, 0
    for sample in load(Tokenizer(str(source)), str(chats), max_seq_len=128).samples:
        labels = torch.from_numpy(sample.labels).long()
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens).long()[None]).logits[0]
        loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    assert reported == pytest.approx(loss_sum / count, rel=1e-5)
    assert reported < 5.5  # the untrained model has 5.7


def test_logits_names_and_config(run, source):
    ours = load_model(str(run / "model"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    tokens = torch.arange(100)[None]
    with torch.no_grad():
        assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, run / "model"))
    assert after == before


def test_tokenizer_and_template(run, source):
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, run / "model"))
    assert after.apply_chat_template(messages, tokenize=False) == before.apply_chat_template(messages, tokenize=False)
    assert after("the cat sat")["input_ids"] == before("the cat sat")["input_ids"]
    assert "Fine-tuned from" in (run / "model" / "README.md").read_text()


@pytest.mark.weekly
def test_trace_tensorboard_and_another_dtype(checkpoint, chats, tmp_path):
    overrides = [
        f"model.path={checkpoint}", f"dataset.path={chats}", "device=cpu", "max_steps=3", f"output_dir={tmp_path}",
        "compute.dtype=bf16", "edit=bf16", "edit=trace",
        "trackers=[tune.loggers.TensorBoard]",
    ]  # fmt: skip
    run_edited("full_finetune", overrides)
    trace = json.loads((tmp_path / "profile" / "steps-1-to-1.json").read_text())
    assert any("SumOfChunksBackward" in event["name"] for event in trace["traceEvents"])
    assert list((tmp_path / "tensorboard").glob("events.*"))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert exported.dtype == torch.bfloat16
