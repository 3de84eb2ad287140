"""The order of a stream depends only on the seed, and resumes after the last row that was read."""

import itertools
import json
from collections import Counter
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_outcomes import Named

from tune.datasets import DataLoader, Stream, load, validation_batches
from tune.datasets.block import Example, RowBlock, TokenizedRow
from tune.datasets.fit import Fit
from tune.datasets.stream import Position
from tune.datasets.workers import map_chunks
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


def stream(make, lengths, pack_to=None, window=64, fingerprint="the same"):
    """Return a stream whose row i has lengths[i] tokens, all equal to i; rows of length 0 are dropped."""

    def row(number):
        if not lengths[number]:
            return TokenizedRow(dropped="empty")
        return TokenizedRow([Example(make.sample(lengths[number], lengths[number] - 1, number))])

    def chunk(numbers):
        block, places = RowBlock.of([(number, row(number)) for number in numbers]), Named("row")
        return Fit(64)(block, None, places)

    def chunks(start):
        return map_chunks(chunk, range(start, len(lengths)), 1)

    return Stream(chunks, "rows.jsonl", 64, pack_to, window, fingerprint)


def rows_of(batch):
    """The (token, sample number) pairs of a batch's documents."""
    documents = []
    for micro_batch in batch.micro_batches:
        real = (micro_batch.positions == 0) & (micro_batch.labels != -100)
        samples = micro_batch.documents.samples[micro_batch.documents.ids]
        documents += list(zip(micro_batch.tokens[real].tolist(), samples[real].tolist(), strict=True))
    return sorted(documents)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.sampled_from([0, 2, 9, 30, 64]), min_size=1, max_size=200).filter(any),
    packed=st.booleans(),
    window=st.sampled_from([64, 128]),
    seed=st.integers(0, 3),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    resumed_ranks=st.sampled_from([1, 2, 3, 4, 8]),
    steps=st.integers(1, 12),
    stop=st.integers(0, 12),
)
@pytest.mark.slow
def test_order_is_the_same_for_any_ranks_and_interruptions(
    make, lengths, packed, window, seed, ranks, resumed_ranks, steps, stop
):
    def loader(rank=0, ranks=1):
        data = stream(make, lengths, 64 if packed else None, window)
        return DataLoader(data, make.world(rank, ranks), 24, 1, max_steps=steps, seed=seed)

    whole = [rows_of(batch) for _, batch in loader()]
    assert len(whole) == steps
    before = [loader(rank, ranks) for rank in range(ranks)]
    seen = [
        sorted(itertools.chain(*(rows_of(batch) for _, batch in step)))
        for step in islice(zip(*before, strict=True), stop)
    ]
    after = [loader(rank, resumed_ranks) for rank in range(resumed_ranks)]
    for resumed in after:
        resumed.load_state_dict(json.loads(json.dumps(before[0].state_dict())))
    seen += [sorted(itertools.chain(*(rows_of(batch) for _, batch in step))) for step in zip(*after, strict=True)]
    assert seen == whole

    times = Counter(token for step in whole for token, _ in step)
    assert not any(times[row] for row, length in enumerate(lengths) if not length)
    counts = [times[row] for row, length in enumerate(lengths) if length]
    if not packed:
        assert max(counts) - min(counts) <= 1
    numbers = [number for step in whole for _, number in step]
    if len(numbers) <= len(counts):
        assert len(set(numbers)) == len(numbers)


def test_packed_pass_has_every_row(make):
    lengths = [1 + row * 7 % 60 for row in range(300)]
    data = DataLoader(stream(make, lengths, 64), make.world(), 8, 1, max_steps=40)
    times = Counter(token for _, batch in data for token, _ in rows_of(batch))
    learned = [row for row, length in enumerate(lengths) if length > 1]
    assert all(times[row] >= 1 for row in learned)


def test_samples_are_numbered_in_order_of_arrival(make):
    """Dropout masks depend on the numbers: dropped rows have none, and a second pass has new ones."""
    lengths = [2 * (row % 3) for row in range(300)]
    data = DataLoader(stream(make, lengths), make.world(), 50, 50, max_steps=6)
    numbers = {(token, number) for _, batch in data for token, number in rows_of(batch)}
    samples = [row for row, length in enumerate(lengths) if length]
    assert {(token, samples.index(token)) for token, _ in numbers} == numbers
    assert len(numbers) == 200


def test_each_pass_shuffles_rows_differently(make):
    data = DataLoader(stream(make, [2] * 64), make.world(), 64, 64, max_steps=3)
    orders = [batch.micro_batches[0].tokens[0][:128:2].tolist() for _, batch in data]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_each_window_is_shuffled_differently(make):
    data = DataLoader(stream(make, [2] * 192), make.world(), 64, 64, max_steps=3)
    orders = [[row % 64 for row in batch.micro_batches[0].tokens[0][:128:2].tolist()] for _, batch in data]
    assert len({tuple(order) for order in orders}) == 3


def test_first_window_is_reported_and_all_rows_are_counted(make):
    data = stream(make, [2] * 100 + [0] * 30)
    assert data.accounting.source == "rows.jsonl, streamed: rows 1 to 64"
    assert data.accounting.rows == 64
    list(DataLoader(data, make.world(), 50, 50, max_steps=2))
    assert (data.seen.rows, data.seen.kept, dict(data.seen.dropped)) == (128, 100, {"empty": 28})


def test_validation_reads_a_stream_once(make):
    data = stream(make, [2] * 150)
    batches = [batch for _, batch in validation_batches(data, make.world(), 8)]
    assert sum(batch.num_tokens for batch in batches) == 300


def test_changed_rows_are_noticed_when_resuming(make):
    loader = DataLoader(stream(make, [4] * 200), make.world(), 8, 1, max_steps=20)
    for _ in islice(loader, 10):
        pass
    changed = DataLoader(stream(make, [4] * 70 + [5] + [4] * 129), make.world(), 8, 1, max_steps=20)
    changed.load_state_dict(loader.state_dict())
    with pytest.raises(TuneError, match=r"rows after row 64 have changed"):
        next(iter(changed))


def test_token_outside_the_vocabulary_is_found_on_arrival(make):
    data = stream(make, [2] * 100)
    data.require_vocabulary(80)
    with pytest.raises(TuneError, match="token 99, but the model's vocab_size is 80"):
        list(DataLoader(data, make.world(), 50, 50, max_steps=2))
    with pytest.raises(TuneError, match="token 63"):
        stream(make, [2] * 100).require_vocabulary(60)


def test_stream_requires_max_steps(make):
    with pytest.raises(TuneError, match=r"max_steps must be set: rows\.jsonl is streamed"):
        DataLoader(stream(make, [2]), make.world(), 4, 1)
    with pytest.raises(TuneError, match=r"epochs=2 must be removed"):
        DataLoader(stream(make, [2]), make.world(), 4, 1, epochs=2, max_steps=9)


# from files


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"{row:04}"}) + "\n" for row in range(3000)))
    return file


@pytest.mark.slow
def test_streamed_file(folder, rows):
    tokenizer = Tokenizer(str(folder))
    data = load(tokenizer, str(rows), max_seq_len=64, packed=True, streaming=True, shuffle_buffer=1000, workers=2)
    assert (data.accounting.rows, data.chunks_of_window) == (1024, 16)
    drawn, _ = next(data.draw(0, 280, Position()))
    texts = [tokenizer.decode(document.tokens.tolist()) for row in drawn.documents for document in row]
    assert (
        len(set(texts)) == len(texts) > 2700
    )  # ten documents of six tokens per row, except in the last row of a window


@pytest.mark.slow
def test_truncated_streamed_file_is_reported(folder, rows, make):
    with rows.open("a") as file:
        file.write('{"text": "a\n')
    data = load(Tokenizer(str(folder)), str(rows), max_seq_len=64, streaming=True, shuffle_buffer=64, workers=1)
    with pytest.raises(TuneError, match=r"rows\.jsonl:3001: malformed JSON"):
        list(DataLoader(data, make.world(), 500, 1, max_steps=10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"streaming": True, "validation_fraction": 0.1}, r"validation_fraction: a stream cannot hold out rows"),
        ({"shuffle_buffer": 100}, r"shuffle_buffer: without streaming=true"),
    ],
)
def test_incompatible_stream_settings_are_refused(folder, rows, settings, message):
    with pytest.raises(TuneError, match=message):
        load(Tokenizer(str(folder)), str(rows), max_seq_len=64, **settings)


def test_stream_without_learnable_rows_is_refused(make):
    with pytest.raises(TuneError, match=r"none of the 200 rows can be used: empty \(200\)"):
        stream(make, [0] * 200)
    with pytest.raises(TuneError, match=r"^rows\.jsonl has no rows: "):
        stream(make, [])
