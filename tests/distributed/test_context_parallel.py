"""Parts of batches: their attention, their balance, and unsupported models."""

import re
from pathlib import Path

import pytest
import torch
from distributed.test_tensor_parallel import model_of
from helpers import result_of, run_processes, seed_of_run
from models.test_attention import SCORINGS, make
from torch import nn
from torch.testing import assert_close

import tune
from tune import distributed
from tune.collators import Batch, Sample, collate
from tune.distributed import context_parallel
from tune.distributed.exchanges import Peers
from tune.errors import TuneError
from tune.models import hf
from tune.models.attention import attend, attend_masked
from tune.models.rope import Rope, RopeConfig

DOCUMENTS = [[7, 1, 24], [32], [5, 5, 5, 17]]  # three rows, as `make` arranges them


class Mesh:
    """The mesh of process `rank` of `processes`."""

    def __init__(self, rank, processes):
        self.rank, self.processes = rank, processes

    def size(self):
        return self.processes

    def get_local_rank(self):
        return self.rank

    def get_group(self):
        return distributed.init("cpu").mesh["cp"].get_group()


def parts(batch, processes):
    return [context_parallel.part_of(batch, Mesh(rank, processes)) for rank in range(processes)]


def batch_of(rows, columns=()):
    draw = torch.Generator().manual_seed(0)

    def sample(length):
        tokens, labels = torch.randint(0, 300, (2, length), generator=draw, dtype=torch.int32)
        labels[torch.rand(length, generator=draw) < 0.4] = -100
        return Sample(tokens.numpy(), labels.numpy(), columns={name: labels.float().numpy() for name in columns})

    return collate([[sample(length) for length in lengths] for lengths in rows], max(map(sum, rows)))


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_every_token_is_in_exactly_one_part(processes):
    batch = batch_of([[7, 1, 23], [32], [5, 9]], columns=["value"])
    counts, labels = torch.zeros(96, dtype=torch.int64), []
    for part in parts(batch, processes):
        places = part.documents.part.places
        real = places < 96
        assert part.tokens.shape == part.labels.shape == part.positions.shape == part.documents.ids.shape
        assert part.tokens.shape[1] == 2 * -(-96 // (2 * processes))
        for name in ("tokens", "labels", "positions"):
            assert torch.equal(getattr(part, name)[0, real], getattr(batch, name).flatten()[places[real]])
        assert torch.equal(part.documents.ids[0, real], batch.documents.ids.flatten()[places[real]])
        assert torch.equal(part.columns["value"][0, real], batch.columns["value"].flatten()[places[real]])
        assert torch.equal(part.supervised, (part.labels[0] != -100).nonzero()[:, 0])
        assert part.num_supervised == len(part.supervised) == len(part.documents.part.supervised)
        assert torch.equal(batch.supervised[part.documents.part.supervised], places[part.supervised])
        counts[places[real]] += 1
        labels.append(part.documents.part.supervised)
    assert torch.equal(counts, torch.ones_like(counts))
    assert torch.equal(torch.cat(labels).sort().values, torch.arange(batch.num_supervised))


@pytest.mark.parametrize("way", [attend, attend_masked])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_parts_attend_like_the_whole_batch(scoring, processes, way, monkeypatch):
    heads, _ = make()
    batch = batch_of(DOCUMENTS)
    expected = attend_masked(*heads, batch.documents, SCORINGS[scoring]).flatten(0, 1)
    query, key, value = (tensor.flatten(0, 1) for tensor in heads)
    divided = parts(batch, processes)
    padding = -96 % (2 * processes)
    places = [part.documents.part.places.clamp(max=95) for part in divided]
    both = torch.cat([torch.cat([key, value], dim=-1)[place] for place in places])
    monkeypatch.setattr(Peers, "gathered", lambda *_: both)
    outputs = torch.zeros_like(expected)
    for part, at in zip(divided, places, strict=True):
        mine = query[at][None], key[at][None], value[at][None]
        if way is attend_masked:
            mine = mine[0], *part.documents.part.attended(*mine[1:])
        real = part.documents.part.places < 96
        output = way(*mine, part.documents, SCORINGS[scoring])[0][real]
        outputs = outputs.index_copy(0, at[real], output)
    assert (96 + padding) % (2 * processes) == 0
    assert_close(outputs, expected)
    gradients = (torch.autograd.grad(output.square().sum(), heads, retain_graph=True) for output in (outputs, expected))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("kind", ["longrope", "yarn", "default"])
def test_parts_rotate_like_the_whole_batch(kind, processes):
    """With LongRoPE, the length of the whole document decides between short and long factors."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0}
    rope = Rope(RopeConfig(8, 40, kind=kind, scaling={**factors, "original_max_position_embeddings": 10}))
    batch = batch_of(DOCUMENTS)
    whole = rope(batch.positions, batch.documents, torch.float32)
    for part in parts(batch, processes):
        places = part.documents.part.places
        real = places < 96
        rotation = rope(part.positions, part.documents, torch.float32)
        for name in ("cos", "sin"):
            assert torch.equal(getattr(rotation, name)[0, real], getattr(whole, name).flatten(0, 1)[places[real]])


def pairs_of(part):
    """Return the number of token pairs of a part between which attention is computed."""
    pieces = zip(part.documents.lengths, part.documents.part.lengths, strict=True)
    return sum(queries * (keys - queries) + queries * (queries + 1) // 2 for queries, keys in pieces)


@pytest.mark.parametrize(("rows", "most"), [([[64]], 1.0), ([[64], [64]], 1.0), ([[31, 9, 3, 21]], 1.3)])
def test_parts_have_about_the_same_work(rows, most):
    work = [pairs_of(part) for part in parts(batch_of(rows), 4)]
    lengths = [length for row in rows for length in row]
    assert sum(work) == sum(length * (length + 1) // 2 for length in lengths)
    assert max(work) <= most * sum(work) / 4


@pytest.mark.slow
def test_sent_and_held_sizes(checkpoint):
    """The figures of docs/layouts.md and of its formulas."""
    measured = result_of(run_processes(Path(__file__).with_name("count_collectives.py"), 1, str(checkpoint), "cp", "2"))
    keys_and_values = 3 * 120 * 2 * 2 * 16
    ways = {"all_gather_into_tensor.default": "in forward", "reduce_scatter_tensor.default": "in backward"}
    assert measured["calls"] == dict.fromkeys(ways, 3) | {"all_reduce.default": 1}
    assert measured["numbers"] == dict.fromkeys(ways, keys_and_values) | {"all_reduce.default": 1}
    text = (Path(tune.__file__).parents[1] / "docs" / "layouts.md").read_text()
    for when in ways.values():
        assert re.search(rf"of all tokens, .* {when} \| 2 L T K \| 3 \| {keys_and_values:,} \|", text)
    assert measured["share"] == measured["gradients"] == pytest.approx(1 / 2, rel=0.02)


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)


def test_unsupported_models_are_rejected(checkpoint, tmp_path):
    pytest.importorskip("transformers")
    refused = [
        (Unknown(), r"parallel\.cp: Unknown .* Set parallel\.cp=1"),
        (hf(str(checkpoint)), r"parallel\.cp: HuggingFaceModel "),
        (model_of(tmp_path, "qwen3_5_text"), r"parallel\.cp: DeltaNet \(blocks\.0\.attention\) "),
    ]
    for model, message in refused:
        with pytest.raises(TuneError, match=message):
            context_parallel.split(model, Mesh(0, 2))
        context_parallel.split(model.requires_grad_(False), Mesh(0, 2))  # a teacher: each process computes all tokens
        assert "forward" not in vars(model)


def test_model_with_split_batches_needs_a_batch(tmp_path):
    model = model_of(tmp_path, "llama")
    context_parallel.split(model, Mesh(0, 2))
    with pytest.raises(TuneError, match=r"parallel\.cp: the model needs a Batch"):
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert isinstance(Batch.of([[1, 2]]), Batch)


@pytest.mark.slow
def test_every_head_matches_one_process(checkpoint):
    """Heads x rows x padding, with random lengths."""
    seed = seed_of_run()
    script = Path(__file__).with_name("heads_in_parts.py")
    result = result_of(run_processes(script, 2, str(checkpoint), str(seed)))
    assert result["agreed"] == result["of"] > 40
