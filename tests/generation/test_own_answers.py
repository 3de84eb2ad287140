"""Documents whose answer is replaced by one of the model, and its supervised tokens."""

import numpy as np
import pytest
import torch

from tune import distributed
from tune.checkpointers import load_model
from tune.collators import Sample, collate
from tune.datasets import GlobalBatch
from tune.generation import Sampler, own_answers
from tune.generation.sampler import uniforms

STOP = 2


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(str(checkpoint))


def conversation(index):
    """Two answers of three tokens each; the last label of each is its end token."""
    tokens = np.arange(20 + index, 32 + index)
    labels = np.full(12, -100)
    labels[2:5], labels[8:11] = tokens[3:6], tokens[9:12]
    return Sample(tokens, labels, index)


def step(rows):
    batches = [collate(micro_batch) for micro_batch in rows]
    count = sum(batch.num_tokens for batch in batches)
    return GlobalBatch([], batches, torch.device("cpu"), count, sum(batch.num_supervised for batch in batches), 0)


def documents(batch):
    """The tokens and labels of each document by its sample index."""
    by_sample = {}
    for micro_batch in batch.micro_batches:
        bounds = micro_batch.documents.boundaries.tolist()
        for place, index in enumerate(micro_batch.documents.samples.tolist()):
            span = slice(bounds[place], bounds[place + 1])
            by_sample[index] = [tensor.flatten()[span].tolist() for tensor in (micro_batch.tokens, micro_batch.labels)]
    return by_sample


def answered(model, rows, share=1.0, number=1, vocab_size=300, pad_to=None, **options):
    sampler = Sampler(max_new_tokens=5, stop_ids=[STOP], **options)
    batch = step(rows)
    return own_answers(
        batch, model, sampler, distributed.init("cpu"), step=number, share=share, vocab_size=vocab_size, pad_to=pad_to
    )  # fmt: skip


def test_only_the_sampled_last_answer_is_supervised(model):
    batch = answered(model, [[[conversation(0)], [conversation(1)]], [[conversation(2)]]])
    sampler = Sampler(max_new_tokens=5, stop_ids=[STOP])
    assert len(batch.micro_batches) == 2
    for index, (tokens, labels) in documents(batch).items():
        prompt = conversation(index).tokens[:9].tolist()
        ((completion,),) = sampler(model, [prompt], step=1, indices=[index])
        assert tokens == prompt + completion.tokens
        assert labels == [-100] * 8 + completion.tokens + [-100]
    counts = [sum(getattr(part, name) for part in batch.micro_batches) for name in ("num_tokens", "num_supervised")]
    assert [batch.num_tokens, batch.num_supervised] == counts


def test_share_of_documents_does_not_depend_on_micro_batches(model):
    rows = [conversation(index) for index in range(40)]
    whole = answered(model, [[[row] for row in rows]], share=0.3)
    changed = {index for index, (tokens, _) in documents(whole).items() if tokens != rows[index].tokens.tolist()}
    assert 5 < len(changed) < 20
    assert all(documents(whole)[index][1] == rows[index].labels.tolist() for index in set(range(40)) - changed)
    # If documents were selected by their first number, their answers would start at the low end of the distribution.
    first = [next(uniforms(0, 1, index, 0)) for index in sorted(changed)]
    assert min(first) < 0.3 < 0.7 < max(first)
    apart = answered(model, [[[rows[2 * pair], rows[2 * pair + 1]]] for pair in reversed(range(20))], share=0.3)
    assert documents(apart) == documents(whole)
    for other in ({"number": 2}, {"seed": 1}):
        others = documents(answered(model, [[[row] for row in rows]], share=0.3, **other))
        assert {index for index, (tokens, _) in others.items() if tokens != rows[index].tokens.tolist()} != changed


def test_answer_starts_after_the_last_unlearned_token(model):
    """There are three answers, and the last gap is one label wide."""
    learned = np.array([2, 3, 6, 7, 9, 10])
    sample = Sample(np.arange(20, 32), np.where(np.isin(np.arange(12), learned), np.arange(21, 33), -100), 0)
    tokens, labels = documents(answered(model, [[[sample]]]))[0]
    assert tokens[:10] == sample.tokens[:10].tolist() and tokens[10:] != sample.tokens[10:].tolist()
    assert labels == [-100] * 9 + tokens[10:] + [-100]


def test_prompt_without_room_keeps_its_answer(model, monkeypatch):
    rows = [conversation(0), Sample(np.arange(20, 40), np.where(np.arange(20) < 15, -100, 30), 1)]
    monkeypatch.setattr(Sampler, "room", lambda self, model: 9)  # as many tokens as the first prompt has
    batch = answered(model, [[rows]])
    assert batch.num_without_room == 1 and answered(model, [[rows]], share=0.0).num_without_room == 0
    assert documents(batch)[1] == [rows[1].tokens.tolist(), rows[1].labels.tolist()]
    assert documents(batch)[0][0] != rows[0].tokens.tolist()


def test_padding_ids_end_an_answer(model):
    """Such ids do not reach the teacher, whose embedding may be smaller."""
    rows = [[[conversation(index)] for index in range(8)]]
    whole, cut = documents(answered(model, rows)), documents(answered(model, rows, vocab_size=150))
    assert max(max(tokens) for tokens, _ in whole.values()) >= 150
    edge = max(token for tokens, _ in whole.values() for token in tokens[9:])  # not an id in a vocabulary of that size
    assert max(max(tokens) for tokens, _ in documents(answered(model, rows, vocab_size=edge)).values()) < edge
    for index, (tokens, labels) in cut.items():
        own = whole[index][0][9:]
        kept = next((at for at, token in enumerate(own) if token >= 150), len(own))
        assert tokens == whole[index][0][: 9 + kept] and sum(label != -100 for label in labels) == kept


def test_process_without_rows(model):
    batch = answered(model, [[[]]])
    assert (batch.num_tokens, batch.num_supervised) == (0, 0) and torch.equal(
        batch.micro_batches[0].labels, torch.tensor([[-100]])
    )


def test_compiled_blocks_get_few_shapes(model):
    """Padding is a document with index 0 that changes no other document and is not counted."""
    rows = [[[conversation(index)] for index in range(start, start + 3)] for start in range(1, 10, 3)]
    plain, padded = answered(model, rows), answered(model, [*rows, [[]]], pad_to=64)
    assert [part.tokens.shape for part in padded.micro_batches] == [(1, 64)] * 4
    assert {index: document for index, document in documents(padded).items() if index} == documents(plain)
    assert (padded.num_tokens, padded.num_supervised) == (plain.num_tokens, plain.num_supervised)
