"""Evaluation in your own script: no World, and models from outside the library."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tune.checkpointers import load_model
from tune.datasets import load, validation_batches
from tune.errors import TuneError
from tune.evaluation import evaluate, log_likelihoods
from tune.losses import LinearCrossEntropy
from tune.tokenizers import Tokenizer

REQUESTS = [([5, 6, 7, 8, 9, 3], [10, 11]), ([20, 21, 4, 40], [12, 13, 14]), ([30], [15])]


def transformers_model(checkpoint):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@torch.no_grad()
def expected(model):
    """The log-probs of the continuations in transformers, one text at a time."""
    sums = []
    for context, continuation in REQUESTS:
        ids = torch.tensor([[*context, *continuation]])
        log_probs = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        sums.append(float(log_probs[torch.arange(len(continuation)), continuation].sum()))
    return sums


def test_log_likelihoods_without_a_world(checkpoint):
    scores = log_likelihoods(load_model(str(checkpoint)), REQUESTS)
    assert [value for value, _ in scores] == pytest.approx(expected(transformers_model(checkpoint)), abs=1e-4)


@pytest.mark.slow
def test_validation_loss_without_a_world(checkpoint, chats):
    dataset = load(Tokenizer(str(checkpoint)), str(chats), max_seq_len=128)
    results = evaluate(
        load_model(str(checkpoint)), validation_batches(dataset, micro_batch_size=4), LinearCrossEntropy()
    )
    theirs, total, count = transformers_model(checkpoint), 0.0, 0
    with torch.no_grad():
        for sample in dataset:
            tokens, labels = torch.tensor(sample.tokens)[None], torch.tensor(sample.labels).long()
            total += float(F.cross_entropy(theirs(tokens.long()).logits[0], labels, reduction="sum"))
            count += int((labels != -100).sum())
    assert results["validation_loss"] == pytest.approx(total / count, abs=1e-5)


class Causal(nn.Module):
    """Attends to all earlier tokens of the row, across documents unless `keeps_apart`."""

    def __init__(self, keeps_apart: bool):
        super().__init__()
        self.keeps_apart = keeps_apart
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.mix = nn.Linear(16, 48, bias=False)

    def forward(self, batch, head):
        hidden = self.embedding(batch.tokens)
        length, ids = batch.tokens.shape[1], batch.documents.ids
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None]
        if self.keeps_apart:
            mask = mask & (ids[:, :, None] == ids[:, None, :])
        query, key, value = self.mix(hidden).chunk(3, dim=-1)
        return head(hidden + F.scaled_dot_product_attention(query, key, value, attn_mask=mask), self.head.weight, batch)


def test_model_that_mixes_documents_is_refused():
    torch.manual_seed(0)
    model = Causal(keeps_apart=False)
    alone = [log_likelihoods(model, [request])[0] for request in REQUESTS]
    with pytest.raises(TuneError, match=r"Causal.*batch_size=1"):
        log_likelihoods(model, REQUESTS)
    for scores in (log_likelihoods(model, REQUESTS, batch_size=1), log_likelihoods(apart(model), REQUESTS)):
        assert [value for value, _ in scores] == pytest.approx([value for value, _ in alone], abs=1e-5)


def apart(model):
    model.keeps_apart = True
    return model


def test_bare_transformers_model_is_refused(checkpoint):
    with pytest.raises(TuneError, match=r"LlamaForCausalLM.*tune\.models\.hf"):
        log_likelihoods(transformers_model(checkpoint), REQUESTS)


@pytest.mark.slow
def test_one_process_needs_no_process_group(checkpoint):
    lines = [
        "import torch.distributed as dist",
        "from tune.checkpointers import load_model",
        "from tune.evaluation import log_likelihoods",
        f"log_likelihoods(load_model({str(checkpoint)!r}), [([5, 6], [7])])",
        "assert not dist.is_initialized()",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
