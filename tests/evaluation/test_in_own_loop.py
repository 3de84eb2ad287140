"""Evaluation in a script of one's own: no World, and models that are not the library's."""

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
    """The log-probs of the continuations by transformers, each text alone."""
    found = []
    for context, continuation in REQUESTS:
        ids = torch.tensor([[*context, *continuation]])
        log_probs = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        found.append(float(log_probs[torch.arange(len(continuation)), continuation].sum()))
    return found


def test_log_likelihoods_without_a_world(checkpoint):
    found = log_likelihoods(load_model(str(checkpoint)), REQUESTS)
    assert [value for value, _ in found] == pytest.approx(expected(transformers_model(checkpoint)), abs=1e-4)


def test_the_loss_of_a_validation_set_without_a_world(checkpoint, chats):
    dataset = load(Tokenizer(str(checkpoint)), str(chats), max_seq_len=128)
    found = evaluate(load_model(str(checkpoint)), validation_batches(dataset, micro_batch_size=4), LinearCrossEntropy())
    theirs, total, count = transformers_model(checkpoint), 0.0, 0
    with torch.no_grad():
        for sample in dataset:
            tokens, labels = torch.tensor(sample.tokens)[None], torch.tensor(sample.labels).long()
            total += float(F.cross_entropy(theirs(tokens.long()).logits[0], labels, reduction="sum"))
            count += int((labels != -100).sum())
    assert found["validation_loss"] == pytest.approx(total / count, abs=1e-5)


class Causal(nn.Module):
    """Attends to all that is before in the row, whatever its document, unless `keeps_apart`."""

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


def test_a_model_whose_tokens_see_other_documents_is_refused():
    torch.manual_seed(0)
    model = Causal(keeps_apart=False)
    alone = [log_likelihoods(model, [each])[0] for each in REQUESTS]
    with pytest.raises(TuneError, match=r"Causal.*batch_size=1"):
        log_likelihoods(model, REQUESTS)
    for found in (log_likelihoods(model, REQUESTS, batch_size=1), log_likelihoods(apart(model), REQUESTS)):
        assert [value for value, _ in found] == pytest.approx([value for value, _ in alone], abs=1e-5)


def apart(model):
    model.keeps_apart = True
    return model


def test_a_model_of_transformers_as_it_is(checkpoint):
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
