"""A method unknown to the library: a data column goes from a file to the loss by name."""

import json

import full_finetune
import pytest
import torch
import torch.nn.functional as F

from tune import config
from tune.collators import Batch
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")


# The whole method: the column `weight` of a row scales the loss of its document.
def weighted(hidden, weight, batch: Batch, softcap=None):
    documents = batch.documents.ids.flatten()[batch.supervised]
    rows, labels = (tensor.flatten(0, 1)[batch.supervised] for tensor in (hidden, batch.labels))
    losses = F.cross_entropy(rows @ weight.T, labels, reduction="none")
    return (losses * batch.columns["weight"][documents]).sum()


def make_weighted(chunk_tokens: int | None = None):
    return weighted


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["true", "false"])
def test_weight_per_document(checkpoint, tmp_path, packed):
    rows = [{"text": f"the cat sat on {i} mats and ran", "weight": i / 3} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"model.path={checkpoint}", f"dataset.path={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'run'}",
        "dataset.extra_columns=[weight]", f"loss._component_={__name__}.make_weighted", "max_seq_len=64", "device=cpu",
        "compute.dtype=fp32", "global_batch_size=8", "micro_batch_size=2", "max_steps=1", f"packed={packed}",
    ]  # fmt: skip
    full_finetune.main(config.load("full_finetune", settings))
    (metrics,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())

    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(checkpoint), Tokenizer(str(checkpoint))
    expected, count = 0.0, 0
    for row in rows:
        tokens = torch.tensor([[*tokenizer.prefix_ids, *tokenizer.encode(row["text"]), tokenizer.eos_id]])
        loss = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="sum")
        expected, count = expected + row["weight"] * loss.item(), count + tokens.shape[1] - 1
    assert metrics["loss"] == pytest.approx(expected / count, rel=1e-5)
    assert metrics["supervised_tokens"] == count
