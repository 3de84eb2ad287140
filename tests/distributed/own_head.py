"""Train a head with parameters of its own in several layouts. Print for each the largest relative difference from one
process, of gradients and their norm, and where it is; then the errors of heads that are refused.

Run in several processes: `own_head.py MODEL LAYOUTS_JSON`, a list of axes.
"""

import json
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tune import distributed
from tune.checkpointers import Pretrained, load_model
from tune.collators import Batch
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.models import build

ROWS, TOPICS = 4, 3


class Topics(nn.Module):
    """A second head, and a learned temperature of both."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, TOPICS)
        self.temperature = nn.Parameter(torch.ones(1))

    def fill(self):
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                own, place = distributed.local_shard(parameter)
                own.copy_(0.5 + 0.3 * torch.randn(parameter.shape, generator=draw)[place])


def head_of(model):
    loss_fn = LinearCrossEntropy(chunk_tokens=8)

    def both(hidden, weight, batch):
        """Sums: the loss of the language model, and that of topics."""
        ends = hidden.flatten(0, 1)[batch.documents.boundaries[1:] - 1]
        logits = model.extra.linear(model.extra.norm(ends)) / model.extra.temperature
        of_topics = cross_entropy(logits, batch.columns["topic"].long(), reduction="sum")
        return loss_fn(hidden * model.extra.temperature, weight, batch), {"topics": [of_topics]}

    return both


def rows_of(rows):
    tokens = torch.randint(0, 90, (ROWS, 14), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1).masked_fill(tokens % 3 == 0, -100)
    batch = Batch.of(tokens[rows], labels[rows])
    batch.columns["topic"] = torch.arange(ROWS)[rows] % TOPICS
    return batch, int((labels != -100).sum())


def measure(model, head, rows, sync=lambda is_last: None):
    """Two micro-batches; the loss is divided by counts of the step."""
    for number, part in enumerate(rows.chunk(2)):
        sync(number == 1)
        batch, count = rows_of(part)
        loss, other = model(batch, head)
        (loss / count + 0.3 * other["topics"][0] / ROWS).backward()
    norm = distributed.clip_grad_norm_(model.parameters(), 0.1)
    gradients = {name: distributed.full_tensor(each.grad) for name, each in model.named_parameters()}
    return gradients | {"norm": norm}


def parallel_model(world):
    with torch.device("meta"):
        model = build(sys.argv[1])
        model.extra = Topics()
    weights = Pretrained(sys.argv[1], model)
    distributed.parallelize(model, world, dtype="fp32")
    weights.load(model)
    model.extra.fill()
    return model


def compare(axes):
    world = distributed.init("cpu", **axes)
    whole = load_model(sys.argv[1])
    whole.extra = Topics()
    whole.extra.fill()
    expected = measure(whole, head_of(whole), torch.arange(ROWS))

    model = parallel_model(world)
    rows = torch.arange(world.data_rank, ROWS, world.data_size)
    found = measure(model, head_of(model), rows, lambda is_last: distributed.set_gradient_sync(model, is_last))
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - value).norm() / value.norm()) for name, value in expected.items()}
    return max(apart.values()), max(apart, key=apart.get)


class Outside(Topics):
    def forward(self, hidden, weight, batch):
        return self.linear(hidden).sum()


def refused():
    """Return the errors of heads that call a block of the model, and whose parameters are not the model's."""
    model = parallel_model(distributed.init("cpu", cp=2))

    def calls_block(hidden, weight, batch):
        return model.blocks[1](hidden, None)

    batch, errors = rows_of(torch.arange(ROWS))[0], []
    for args, keywords in (([calls_block], {}), ([Outside()], {}), ([], {"head": Outside()})):
        try:
            model(batch, *args, **keywords)
        except TuneError as error:
            errors.append(str(error))
    return errors


apart = [compare(axes) for axes in json.loads(sys.argv[2])]
print(json.dumps([apart, refused()]))
distributed.current_world().finish()
