"""Losses of a head whose rows are sharded over processes equal those of the whole head."""

import pytest
from helpers import run_processes

SCRIPT = """
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

from tune import distributed
from tune.collators import Batch
from tune.losses import ForwardKL, JensenShannon, LinearCrossEntropy, LogProbs, MostProbable, ReverseKL, Teacher, TopK

world = distributed.init("cpu", tp=3)
mesh, draw = world.mesh["tp"], torch.Generator().manual_seed(0)
tokens, labels = torch.randint(0, 30, (2, 2, 20), generator=draw)
labels[0, :7] = -100
batch = Batch.of(tokens, labels)
start, rows = torch.randn(2, 20, 8, generator=draw), torch.randn(30, 8, generator=draw)
rows[11] = rows[22] = rows[3]  # of the highest logits the first counts
labels[1, ::3] = 3
batch = Batch.of(tokens, labels)
wanted = labels.flatten() != -100
targets = labels.flatten()[wanted]


def leaves():
    own = rows.chunk(3)[world.rank].clone().requires_grad_()
    hidden = start.clone().requires_grad_()
    whole_hidden, whole = start.clone().requires_grad_(), rows.clone().requires_grad_()
    return hidden, own, DTensor.from_local(own, mesh, [Shard(0)]), whole_hidden, whole


def whole_logits(hidden, weight, softcap, temperature=1.0):
    logits = hidden.flatten(0, 1)[wanted] @ weight.T
    return (logits if softcap is None else torch.tanh(logits / softcap) * softcap) / temperature


def assert_gradients(hidden, own, whole_hidden, whole):
    assert_close(distributed.summed(hidden.grad, mesh.get_group().group_name), whole_hidden.grad)
    assert_close(own.grad, whole.grad.chunk(3)[world.rank])


for softcap in (None, 4.0):
    hidden, own, shares, whole_hidden, whole = leaves()
    loss_fn = LinearCrossEntropy(chunk_tokens=7, accuracy=True)
    loss = loss_fn(hidden, shares, batch, softcap=softcap)
    logits = whole_logits(whole_hidden, whole, softcap)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    (2 * loss).backward(), (2 * expected).backward()
    assert_close(loss, expected)
    assert loss_fn.counts.tolist() == [(logits.argmax(dim=1) == targets).sum().item(), len(targets)]
    assert_gradients(hidden, own, whole_hidden, whole)

    hidden, own, shares, whole_hidden, whole = leaves()
    found = LogProbs(chunk_tokens=7, temperature=0.7)(hidden, shares, batch, softcap=softcap)
    logits = whole_logits(whole_hidden, whole, softcap, 0.7)
    log_probs = logits.log_softmax(dim=1)
    of_targets = log_probs.gather(1, targets[:, None])[:, 0]
    assert_close(found.log_probs, of_targets)
    assert_close(found.entropies, -(log_probs.exp() * log_probs).sum(dim=1))
    assert torch.equal(found.is_argmax, logits.gather(1, targets[:, None])[:, 0] == logits.amax(dim=1))
    weights = torch.linspace(-1, 1, len(targets))
    (found.log_probs * weights).sum().backward(), (of_targets * weights).sum().backward()
    assert_gradients(hidden, own, whole_hidden, whole)


def shared(weight):
    return DTensor.from_local(weight.chunk(3)[world.rank].clone(), mesh, [Shard(0)])


def stored(hidden, weight, **options):
    found = MostProbable(15, 2.0, 7, **options)(hidden, weight, batch)  # more than a process has rows
    return TopK(found[:, :15].long(), found[:, 15:])


labels[labels >= 18] = 5
batch = Batch.of(tokens, labels)
theirs = torch.randn(2, 20, 6, generator=draw)
for number, cut in ((30, None), (30, 18), (36, None), (36, 25), (31, None), (24, 18)):  # below 18 the third has no row
    of_teacher = torch.randn(number, 6, generator=draw)
    sharded = shared(of_teacher) if number % 3 == 0 else of_teacher
    exact, found = stored(theirs, of_teacher, vocab_size=cut), stored(theirs, sharded, vocab_size=cut)
    assert torch.equal(found.ids, exact.ids)
    assert_close(found.log_probs, exact.log_probs)
    whole_teacher, teacher = (Teacher(theirs, each, None) for each in (of_teacher, sharded))
    for kept, of_kept in ((whole_teacher, teacher), (exact, found)):
        if isinstance(kept, TopK) and kept.ids.max() >= 30:
            continue
        for divergence in (ForwardKL, ReverseKL, JensenShannon):
            hidden, own, shares, whole_hidden, whole = leaves()
            loss_fn = divergence(2.0, 0.25, 7, cut)
            loss = loss_fn(hidden, shares, batch, teacher=of_kept)
            expected = loss_fn(whole_hidden, whole, batch, teacher=kept)
            (2 * loss).backward(), (2 * expected).backward()
            assert_close(loss, expected)
            assert_gradients(hidden, own, whole_hidden, whole)
print("equal")
world.finish()
"""


@pytest.mark.slow
def test_head_sharded_over_three_processes(tmp_path):
    (tmp_path / "shares.py").write_text(SCRIPT)
    assert run_processes(tmp_path / "shares.py", 3).strip().endswith("equal")
