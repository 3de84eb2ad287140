"""Ray Data as a source gives the same rows in the same order as `streaming=true`, for any number of processes."""

import json
import os
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tune.datasets import DataLoader, load, ray
from tune.datasets.ray_data import map_by_ray
from tune.datasets.workers import ALONE, CHUNK, map_chunks
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


@pytest.mark.slow
def test_several_processes_need_one_cluster(checkpoint: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tune.datasets import ray_data

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_data.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_data.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(ray_data.dist, "get_world_size", lambda: 2)
    with pytest.raises(TuneError, match=r"several processes need one cluster.*`tune run --launcher ray`"):
        ray(Tokenizer(str(checkpoint)), str(chats), max_seq_len=64)


@pytest.fixture(scope="module")
def cluster():
    from tune.ray_cluster import connect

    module, _ = connect(None, 2)
    yield module
    module.shutdown()


def contents(batch) -> list[tuple]:
    return [
        (part.tokens.tolist(), part.labels.tolist(), part.documents.samples.tolist()) for part in batch.micro_batches
    ]


@pytest.mark.weekly
@pytest.mark.parametrize("packed", [False, True])
def test_same_rows_and_order_as_a_stream_also_after_resuming(
    cluster, checkpoint: Path, tmp_path: Path, make, packed: bool
) -> None:
    file, tokenizer = tmp_path / "rows.jsonl", Tokenizer(str(checkpoint))
    rows = [{"text": " ".join(["cat", "dog", "sat"] * (1 + number * 7 % 13))} for number in range(500)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"max_seq_len": 64, "packed": packed, "shuffle_buffer": 128}

    def loader(component, **others):
        return DataLoader(component(tokenizer, str(file), **options, **others), make.world(), 16, 16, max_steps=60)

    expected = [contents(batch) for _, batch in loader(load, streaming=True)]
    data = loader(ray)
    first = [contents(batch) for _, batch in islice(data, 17)]
    resumed = loader(ray)
    resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert first + [contents(batch) for _, batch in resumed] == expected


@pytest.mark.weekly
def test_mistakes_are_raised_at_their_row(cluster, checkpoint: Path, tmp_path: Path, make) -> None:
    file, tokenizer = tmp_path / "rows.jsonl", Tokenizer(str(checkpoint))
    rows = [json.dumps({"text": "the cat sat"})] * 300
    for at, wrong, message in ((200, '{"text": 3}', r"rows\.jsonl:201: "), (250, '{"text":', r"rows\.jsonl:251: ")):
        file.write_text("\n".join([*rows[:at], wrong, *rows[at:]]))
        data = ray(tokenizer, str(file), max_seq_len=64, shuffle_buffer=64)
        steps = DataLoader(data, make.world(), 64, 64, max_steps=9)
        taken = []
        with pytest.raises(TuneError, match=message):
            taken += [step for step, _ in steps]


@pytest.mark.weekly
def test_tasks_do_not_wait_for_cpus_held_by_training(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    @cluster.remote
    class Training: ...

    cpus = cluster.cluster_resources()["CPU"]
    training = Training.options(num_cpus=cpus).remote()
    cluster.get(training.__ray_ready__.remote())
    monkeypatch.setattr(cluster, "available_resources", lambda: {"CPU": cpus})  # Ray's view is seconds late
    assert sum(map_by_ray(len, lambda: iter(range(1000)), None)) == 1000
    cluster.kill(training)


@pytest.mark.weekly
def test_no_process_is_forked_while_connected(cluster) -> None:
    """A fork has the connection's sockets but not its threads: answers got lost and a run hung."""
    assert {*map_chunks(lambda chunk: os.getpid(), range(ALONE + 9 * CHUNK), 2)} == {os.getpid()}


@pytest.mark.weekly
def test_each_process_gets_every_chunk_and_chunks_are_then_freed(cluster) -> None:
    from tune.datasets.ray_data import _Passes

    passes = _Passes(lambda start: iter(range(start, 5)), os.getcwd(), 2)
    values = Counter()
    for index in range(6):
        for rank in (0, 1):
            (chunk,) = passes.chunk(rank, 0, 0, index)
            values[rank, chunk and cluster.get(chunk)] += 1
            assert len(passes.passes[0][1]) <= 2
    assert values == {(rank, value): 1 for rank in (0, 1) for value in (0, 1, 2, 3, 4, None)}
    passes.chunk(0, 1, 3, 0)
    assert passes.passes.keys() == {0, 1}  # the other process may still need it
    passes.chunk(1, 1, 3, 0)
    assert passes.passes.keys() == {1}
