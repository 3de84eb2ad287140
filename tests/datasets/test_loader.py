"""The rows of a step depend on the seed and the epoch, not on the ranks that read them."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tune.datasets import DataLoader, validation_batches
from tune.errors import TuneError


def documents(batches):
    """The first token of each document, which identifies its sample."""
    starts = [batch.tokens[batch.positions == 0] for batch in batches]
    labels = [batch.labels[batch.positions == 0] for batch in batches]
    return [
        int(t) for ts, ls in zip(starts, labels, strict=True) for t, label in zip(ts, ls, strict=True) if label != -100
    ]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=8, max_size=40),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    seed=st.integers(0, 5),
    packed=st.booleans(),
    pad_to=st.sampled_from([None, 64]),
)
def test_all_layouts_read_the_same_rows(make, lengths, ranks, micro, accumulation, seed, packed, pad_to):
    data = make.dataset(lengths, packed=packed)
    assume(len(data) >= ranks)
    size = ranks * micro * accumulation

    def run(ranks, micro):
        loaders = [DataLoader(data, make.world(r, ranks), size, micro, epochs=2, seed=seed) for r in range(ranks)]
        for loader in loaders:
            loader.pad_to = pad_to
        return [[batch for _, batch in loader] for loader in loaders]

    (alone,) = run(1, 1)
    together = run(ranks, micro)
    for step, expected in enumerate(alone):
        parts = [loader[step] for loader in together]
        read = [document for part in parts for document in documents(part.micro_batches)]
        assert sorted(read) == sorted(documents(expected.micro_batches))
        assert all(part.rows == expected.rows for part in parts)
        assert {part.num_supervised for part in parts} == {
            sum(batch.num_supervised for batch in expected.micro_batches)
        }
        assert {part.num_tokens for part in parts} == {sum(batch.num_tokens for batch in expected.micro_batches)}
        assert len({len(part.micro_batches) for part in parts}) == 1
    for epoch in (alone[: len(alone) // 2], alone[len(alone) // 2 :]):
        assert sorted(row for batch in epoch for row in batch.rows) == list(range(len(data)))


def test_order_changes_with_the_epoch_and_the_seed(make):
    data = make.dataset([2] * 30)

    def orders(seed):
        return [batch.rows for _, batch in DataLoader(data, make.world(), 30, 1, epochs=2, seed=seed)]

    first, second = orders(0)
    assert first != second
    assert orders(0) == [first, second]
    assert first not in orders(1)


def test_rows_of_a_micro_batch_have_similar_lengths(make):
    loader = DataLoader(make.dataset(list(range(2, 34))), make.world(1, 2), 32, 4)
    ((_, batch),) = loader
    assert [micro_batch.num_tokens for micro_batch in batch.micro_batches] == [
        sum(range(33, 25, -2)) - 4, sum(range(25, 17, -2)) - 4, sum(range(17, 9, -2)) - 4, sum(range(9, 1, -2)) - 4,
    ]  # fmt: skip


def test_steps_are_numbered_from_one_to_the_end(make):
    data = make.dataset([4] * 10)
    loader = DataLoader(data, make.world(), 4, 2, epochs=2)
    assert len(loader) == 6
    assert [step for step, _ in loader] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in DataLoader(data, make.world(), 4, 2, epochs=2, max_steps=5)] == [1, 2, 3, 4, 5]
    assert len(DataLoader(data, make.world(), 4, 2, epochs=2, max_steps=50)) == 6


@pytest.mark.parametrize("stop", range(6))
def test_resumed_run_continues_after_the_saved_step_on_any_ranks(make, stop):
    data = make.dataset(list(range(4, 24)))
    whole = [(step, batch.rows) for step, batch in DataLoader(data, make.world(), 8, 2, epochs=2, seed=3)]
    stopped = DataLoader(data, make.world(), 8, 2, epochs=2, seed=3)
    seen = [(step, batch.rows) for step, batch in islice(stopped, stop)]
    resumed = DataLoader(data, make.world(1, 4), 8, 1, epochs=2, seed=3)
    resumed.load_state_dict(stopped.state_dict())
    assert seen + [(step, batch.rows) for step, batch in resumed] == whole


def test_resuming_with_other_data_is_refused(make):
    saved = DataLoader(make.dataset([4, 5, 6]), make.world(), 2, 1).state_dict()
    changed = DataLoader(make.dataset([4, 5, 7]), make.world(), 3, 1, seed=7)
    with pytest.raises(
        TuneError, match=r"fingerprint was \w+ and is now \w+; seed was 0 .* 7; global_batch_size was 2 .* 3"
    ):
        changed.load_state_dict(saved)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 2), (3, 4)])
def test_validation_reads_every_row_once(make, ranks, micro):
    data = make.dataset(list(range(4, 17)))
    parts = [[batch for _, batch in validation_batches(data, make.world(rank, ranks), micro)] for rank in range(ranks)]
    assert sorted(document for part in parts for document in documents(part)) == list(range(13))
    assert len({len(part) for part in parts}) == 1


def test_indivisible_batch_sizes_are_refused(make):
    data = make.dataset([4] * 20)
    message = (
        r"global_batch_size=12 is not a multiple of 8 .*Set global_batch_size to 8 or 16, or micro_batch_size to 1, 3$"
    )
    with pytest.raises(TuneError, match=message):
        DataLoader(data, make.world(0, 4), 12, 2)
    with pytest.raises(TuneError, match=r"Set global_batch_size to 4$"):
        DataLoader(data, make.world(0, 4), 3, 1)


def test_more_processes_than_rows_is_refused(make):
    with pytest.raises(TuneError, match=r"has 2 rows, too few for 4 data-parallel processes\. Use at most 2$"):
        DataLoader(make.dataset([4, 4]), make.world(0, 4), 4, 1)
    with pytest.raises(TuneError, match=r"has 1 rows, .* or packed=false \(2 rows\)"):
        DataLoader(make.dataset([4, 4], packed=True), make.world(0, 4), 4, 1)


@pytest.mark.parametrize(
    ("epochs", "steps"), [(0.5, 5), (1.5, 15), (1.1, 11), (1.11, 12), (0.001, 1), (3.0, 30), (3, 30), (0.3, 3)]
)
def test_fractional_epochs(epochs, steps, make):
    """The number of steps is epochs x 10, rounded up; 1.1 is not treated as 1.1000000000000001."""
    data = make.dataset([9] * 40)
    loader = DataLoader(data, make.world(), 4, 2, epochs=epochs, seed=3)
    whole = [batch.rows for _, batch in DataLoader(data, make.world(), 4, 2, epochs=3, seed=3)]
    assert len(loader) == steps and [batch.rows for _, batch in loader] == whole[:steps]
    assert len(DataLoader(data, make.world(), 4, 2, epochs=epochs, max_steps=2)) == min(2, steps)


def test_fractional_epoch_can_be_resumed(make):
    data = make.dataset([9] * 40)
    whole = [batch.rows for _, batch in DataLoader(data, make.world(), 4, 2, epochs=1.5)]
    stopped = DataLoader(data, make.world(), 4, 2, epochs=0.5)
    assert [batch.rows for _, batch in stopped] == whole[:5]
    resumed = DataLoader(data, make.world(), 4, 2, epochs=1.5)
    resumed.load_state_dict(stopped.state_dict())
    assert [(step, batch.rows) for step, batch in resumed] == list(enumerate(whole[5:], 6))
    with pytest.raises(TuneError, match="step 5"):
        DataLoader(data, make.world(), 4, 2, epochs=0.3).load_state_dict(stopped.state_dict())


@pytest.mark.parametrize(
    ("order", "facts"),
    [
        (np.arange(15), ["30", "(15,)"]),
        (np.arange(30) - 1, ["-1 to 28", "29"]),
        (np.arange(30) + 1, ["1 to 30", "29"]),
        (np.arange(30) / 2, ["float64"]),
    ],
)
def test_invalid_orders_are_refused(make, order, facts):
    data = make.dataset([2] * 30)
    data.order = lambda seed, epoch: order
    with pytest.raises(TuneError) as error:
        list(DataLoader(data, make.world(), 10, 1))
    assert all(fact in str(error.value) for fact in facts)


def test_order_may_be_a_list_and_repeat_rows(make):
    data = make.dataset([2] * 30)
    data.order = lambda seed, epoch: [3] * 30
    assert [batch.rows for _, batch in DataLoader(data, make.world(), 15, 1)] == [[3] * 15] * 2


def test_packed_rows_may_be_padded_to_their_capacity(make):
    """Compiled blocks then see one shape, in training and validation; rows that are not packed keep their lengths."""
    packed, plain = make.dataset([20, 9, 30, 5, 17], packed=True), make.dataset([20, 9, 30, 5, 17])
    for data, pad_packed, padded in ((packed, True, True), (packed, False, False), (plain, True, False)):
        data.validation = make.dataset([7, 40, 12], packed=data is packed)
        loader = DataLoader(data, make.world(), 2, 1, pad_packed=pad_packed)
        trained = [part.tokens.shape[1] for _, batch in loader for part in batch.micro_batches]
        validated = [batch.tokens.shape[1] for _, batch in loader.validation_batches()]
        assert trained and validated
        for lengths in (trained, validated):
            assert (set(lengths) == {64}) == padded


def test_validation_batches_have_each_row_once_in_the_sizes_of_the_loader(make):
    data = make.dataset([8] * 12)
    data.validation = make.dataset([5, 9, 7, 3, 8])
    loaders = [DataLoader(data, make.world(rank, 2), 4, 2) for rank in range(2)]
    parts = [[batch for _, batch in loader.validation_batches()] for loader in loaders]
    assert [len(part) for part in parts] == [2, 2] and max(
        len(documents([batch])) for part in parts for batch in part
    ) == 2
    assert sorted(document for part in parts for document in documents(part)) == [0, 1, 2, 3, 4]


def test_a_step_has_a_micro_batch_for_each_stage(make):
    """Else some stages of a pipeline would always wait."""
    world = make.world(0, 2)
    world.num_stages = 4
    data = make.dataset([5] * 16)
    assert len(DataLoader(data, world, 16, 2)) == 1
    with pytest.raises(TuneError, match=r"^parallel\.pp: .* 2 .* 4 .* 16"):
        DataLoader(data, world, 8, 2)
