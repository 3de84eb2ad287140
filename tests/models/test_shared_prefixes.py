"""Shared prefixes of a batch are computed once, with the same results."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from models.test_families import SMALL, VARIANTS, make_pair
from torch.testing import assert_close

from tune import peft
from tune.collators import Sample, collate
from tune.distributed.activations import wrap_forward
from tune.losses import LogProbs

transformers = pytest.importorskip("transformers")


def answers(*lengths, prompts=(50, 40)):
    """Rows with an answer per length to each of two prompts that share their first ten tokens."""
    draw = np.random.default_rng(0)
    start = draw.integers(128, size=10)
    rows = []
    for length in prompts:
        prompt = [*start, *draw.integers(128, size=length - 10)]
        for size in lengths:
            tokens = np.array([*prompt, *draw.integers(128, size=size)], dtype=np.int32)
            labels = np.append(tokens[1:], -100).astype(np.int32)
            labels[: length - 1] = -100  # the prompt's last token is supervised
            rows.append([Sample(tokens, labels, columns={"reward": np.float32(0)})])
    return rows


def model_of(name, folder):
    config_class, changes = VARIANTS[name]
    return make_pair(getattr(transformers, config_class)(**SMALL | changes), folder)[1]


def log_probs_and_gradients(model, batch):
    """The log-probs, the gradients and the router sums."""
    model.zero_grad()
    log_probs = model.train()(batch.in_step(0, 0, num_supervised=1), LogProbs()).log_probs
    weights = torch.linspace(-1, 1, len(log_probs))
    (log_probs * weights).sum().backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return [log_probs.detach(), *gradients.values(), *([model.routing.take()] if model.routing else [])]


def computed(model, batch):
    """The number of tokens in the input of the first block."""
    with torch.no_grad():
        seen = []
        hook = model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
        model(batch)
        hook.remove()
    return seen[0]


FAMILIES = ["llama", "gemma3_text", "gpt_oss", "qwen3_moe-window", "deepseek_v3", "ministral3"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_gradients_match_separate_answers(name, tmp_path):
    model = model_of(name, tmp_path)
    if model.routing:
        model.config = replace(model.config, router_loss=0.3)
    rows = answers(30, 5, 17)
    batch = collate(rows)
    assert computed(model, batch) == batch.shared.tokens.shape[1] == 49 + 29 + 2 * (31 + 6 + 18)
    assert computed(model, replace(batch, shared=None)) == batch.tokens.shape[1] == 374
    alone, together = log_probs_and_gradients(model, replace(batch, shared=None)), log_probs_and_gradients(model, batch)
    for one, other in zip(together, alone, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    assert_close(model.eval()(batch), model(replace(batch, shared=None)), rtol=1e-5, atol=1e-5)  # logits of all tokens


@pytest.mark.slow
def test_checkpointing_computes_the_same(tmp_path):
    model, batch = model_of("gemma3_text", tmp_path), collate(answers(30, 5, 17))
    alone = log_probs_and_gradients(model, replace(batch, shared=None))
    for block in model.blocks:
        wrap_forward(block, "full", compile=False, offload=False)
    assert_close(log_probs_and_gradients(model, batch), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.weekly
def test_compiled_blocks_compute_the_same(tmp_path):
    """They use one mask for all documents, like the boundaries of a GPU kernel."""
    model = model_of("qwen3_moe-window", tmp_path)
    batches = [collate(answers(*lengths)) for lengths in ((30, 5, 17), (20, 9), (8, 8, 8, 9))]
    alone = [log_probs_and_gradients(model, replace(batch, shared=None)) for batch in batches]
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for batch, expected in zip(batches, alone, strict=True):
        assert_close(log_probs_and_gradients(model, batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_5_text", "phi3-longrope", "dropout"])
def test_models_that_compute_each_answer_alone(name, tmp_path):
    """Reasons: a recurrent state, a rotation that depends on the document length, dropout masks per token."""
    model, batch = model_of("llama" if name == "dropout" else name, tmp_path), collate(answers(30, 5, 17))
    if name == "dropout":
        peft.add_adapters(model, peft.LoRA(rank=2, dropout=0.1))
    assert batch.shared is not None
    batch = batch.in_step(0, 0, batch.num_supervised)
    assert computed(model.train(), batch) == batch.tokens.shape[1]
    if name == "dropout":  # only in training
        assert computed(model.eval(), batch) == batch.shared.tokens.shape[1]


def test_shared_tokens_are_computed_once():
    def document(tokens, unlearned):
        labels = np.array([*tokens[1:], -100])
        labels[:unlearned] = -100
        return Sample(np.array(tokens), labels)

    same = [1, 2, 3, 4, 5, 6]
    first, second, other = document([*same, 7, 8], 6), document([*same, 9], 4), document([5, 6, 7, 8], 0)
    batch = collate([[other, first], [second, first]])
    shared = batch.shared
    # The first is learned from its seventh token, the second from its fifth; the last repeats the first.
    assert shared.tokens.tolist() == [[5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 9, 7, 8]]
    assert shared.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 6, 7]]
    assert shared.documents.lengths == (4, 8, 3, 2)
    assert torch.equal(shared.of_batch(shared.tokens), batch.tokens)
    assert (batch.num_tokens, batch.num_supervised) == (27, 7)
    assert collate([[first], [second]], pad_to=8).shared is None  # compiled for rows of 8
    assert collate([[first], [other], [document([1, 9, 9, 9, 9, 9, 9, 9, 9], 5)]]).shared is None  # one token


def test_document_without_labels_keeps_its_last_token():
    """Such documents only get a score."""
    tokens = np.arange(5)
    batch = collate([[Sample(tokens, np.full(5, -100))]] * 2)
    assert batch.shared.tokens.tolist() == [[0, 1, 2, 3, 4, 4]]
