"""Print for how many random batches heads give the same results and gradients as on one process.

Run in several processes that share the tokens of each batch: `heads_in_parts.py MODEL SEED`.
"""

import json
import random
import sys

import numpy as np
import torch

from tune import distributed, losses
from tune.checkpointers import Pretrained, load_model
from tune.collators import Sample, collate
from tune.losses import divergences, policy
from tune.models import build

K = 5


def parallel_model(path):
    with torch.device("meta"):
        model = build(path)
    weights = Pretrained(path, model)
    distributed.parallelize(model, world, dtype="fp32")
    weights.load(model)
    return model


def of_teacher(loss):
    """Return a head that runs another model on the same batch, as the distillation recipe does."""

    def head(hidden, weight, batch):
        with torch.no_grad():
            target = teacher(batch, divergences.Teacher.head)
        return loss(hidden, weight, batch, teacher=target)

    return losses.takes_shares(head)


def of_stored(hidden, weight, batch):
    target = divergences.TopK.stored(batch.columns["teacher"], batch)
    return losses.ForwardKL(cross_entropy=0.3)(hidden, weight, batch, teacher=target)


def of_values(hidden, weight, batch):
    return policy.token_values(hidden, weight[:1], batch)


def of_scores(scores):
    """Return a head for scores computed from the first row of a token head."""
    return lambda hidden, weight, batch: scores(hidden, weight[:1], batch)


def hidden_states(hidden, weight, batch):
    return divergences.Teacher.head(hidden, weight, batch).hidden.clone()


def of_your_own(hidden, weight, batch):
    """A custom head without sums or token values: the greatest logit of each document's mean."""
    documents = batch.documents.ids.flatten()
    sums = hidden.new_zeros(len(batch.documents.lengths), hidden.shape[-1]).index_add(
        0, documents, hidden.flatten(0, 1)
    )
    return (sums / torch.tensor(batch.documents.lengths)[:, None] @ weight.T).amax(dim=1)


HEADS = {
    "cross-entropy": losses.LinearCrossEntropy(8),
    "log-probs": losses.LogProbs(8),
    "forward": of_teacher(losses.ForwardKL(chunk_tokens=8)),
    "reverse": of_teacher(losses.ReverseKL(temperature=2.0)),
    "Jensen-Shannon": of_teacher(losses.JensenShannon(cross_entropy=0.5)),
    "stored": of_stored,
    "most probable": divergences.MostProbable(K),
    "hidden states": hidden_states,
    "scores": of_scores(losses.LastTokenScores()),
    "scores before padding": of_scores(losses.LastTokenScores(pad_id=0)),
    "values": of_values,
    "logits": None,
    "your own": of_your_own,
}


def batch_of(draw, count, is_padded):
    rows = [[draw.randint(2, 14) for _ in range(draw.randint(1, 3))] for _ in range(count)]
    longest = max(map(sum, rows))
    if not is_padded:
        rows = [[*row, longest - sum(row)] if sum(row) < longest else row for row in rows]
    numbers = np.random.default_rng(draw.randrange(2**32))

    def sample(length):
        labels = numbers.integers(1, 90, length, dtype=np.int32)
        labels[numbers.random(length) < 0.4] = -100
        ids = np.stack([numbers.permutation(90)[:K] for _ in range(length)])
        log_probs = np.log(numbers.dirichlet(np.ones(K + 1), length))
        columns = {"teacher": np.concatenate([ids, log_probs], axis=1).astype(np.float32)}
        return Sample(numbers.integers(1, 90, length, dtype=np.int32), labels, columns=columns)

    return collate([[sample(length) for length in row] for row in rows], longest + is_padded * draw.randint(1, 5))


def result_of(model, batch, head):
    """Return the output of `head` and the gradients of a sum that weights each element differently."""
    outputs = model(batch, head)
    outputs = [value for value in (outputs if isinstance(outputs, tuple) else [outputs]) if value is not None]
    weighted = [
        value * (1 + torch.arange(value.numel()) % 7).view(value.shape) for value in outputs if value.requires_grad
    ]
    if weighted:
        sum(value.sum() for value in weighted).backward()
    values = {f"value {index}": value.detach().float() for index, value in enumerate(outputs)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            values[name] = distributed.full_tensor(parameter.grad)
        parameter.grad = None
    return values


path, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
world = distributed.init("cpu", cp=2)
split, whole = parallel_model(path), load_model(path)
teachers = {True: parallel_model(path).requires_grad_(False), False: load_model(path).requires_grad_(False)}
for teacher in teachers.values():
    with torch.no_grad():  # another model with other predictions
        for parameter in teacher.parameters():
            own = distributed.local_shard(parameter)[0]
            own.mul_(0.8)
agreed = 0
for name, head in HEADS.items():
    for count in (1, draw.randint(2, 4)):
        for is_padded in (False, True):
            batch = batch_of(draw, count, is_padded)
            teacher = teachers[False]
            expected = result_of(whole, batch, head)
            teacher = teachers[True]
            result = result_of(split, batch, head)
            assert result.keys() == expected.keys(), (name, count, is_padded)
            for part, value in expected.items():
                apart = (result[part] - value).norm()
                assert apart <= 1e-5 * value.norm() + 5e-6, (name, count, is_padded, part, apart, value.norm())
            agreed += 1
if world.is_main:
    print(json.dumps({"agreed": agreed, "of": 4 * len(HEADS)}))
world.finish()
