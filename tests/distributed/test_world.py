import signal

import pytest
import torch

from tune import distributed
from tune.errors import TuneError


def test_one_process_is_a_world_of_one():
    world = distributed.init("cpu")
    assert (world.rank, world.size, world.is_main, world.data_rank, world.data_size) == (0, 1, True, 0, 1)
    assert world.fetch(a=world.sum(torch.tensor(2.5)), b=world.any(True), c=3) == {"a": 2.5, "b": 1, "c": 3}
    assert world.share({"a": 1}) == {"a": 1}


def test_counts_stay_exact():
    assert distributed.init("cpu").sum(2**40 + 1).item() == 2**40 + 1


def test_mesh_that_does_not_match():
    with pytest.raises(TuneError, match=r"dp_replicate=2 x dp_shard=auto does not make 1 processes"):
        distributed.init("cpu", dp_replicate=2)
    with pytest.raises(TuneError, match=r"dp_replicate=1 x dp_shard=3 does not make 1 processes"):
        distributed.init("cpu", dp_shard=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_device_that_is_not_there():
    with pytest.raises(TuneError, match="cuda is not available on this machine; available: "):
        distributed.init("cuda")


def test_interrupt_waits_to_be_asked():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        interrupt = distributed.Interrupt()
        assert not interrupt.requested
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
