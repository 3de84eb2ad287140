"""The settings that lower the memory of a run."""

import pytest

from tune import config
from tune.config import less_memory

PATHS = ["model.path=a", "dataset.path=b"]


@pytest.mark.parametrize("recipe", [*config.list_recipes_with_settings()])
def test_each_setting_is_lower(recipe):
    cfg, _ = config.read(recipe, [*PATHS, "micro_batch_size=4"], imports=False)
    changes = less_memory(cfg, has_gpu=True)
    if recipe != "evaluate":
        assert changes[0] == ("micro_batch_size", 1) and ("compute.activation_checkpointing", "full") in changes
    again, _ = config.read(recipe, [*PATHS, *(f"{key}={value}" for key, value in changes)], imports=False)
    lowest = dict(less_memory(again, has_gpu=True))
    assert {key: value for key, value in lowest.items() if dict(changes)[key] == value} == {}
    assert all(isinstance(value, int) and value < dict(changes)[key] for key, value in lowest.items())


def test_without_a_gpu_nothing_moves_to_the_host():
    cfg, _ = config.read("full_finetune", PATHS, imports=False)
    with_gpu, without = (dict(less_memory(cfg, has_gpu)) for has_gpu in (True, False))
    assert with_gpu.keys() - without.keys() == {"compute.activation_offload", "compute.cpu_offload"}
    assert without.keys() <= with_gpu.keys() and "max_seq_len" in without
