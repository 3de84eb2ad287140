"""The traffic that a run reports equals the counted traffic, measured on one process, or on several if needed."""

from pathlib import Path

import pytest
from helpers import result_of, run_processes, save_checkpoint, slow_but

COUNT = Path(__file__).with_name("count_collectives.py")
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
AXES = ("dp_shard", "HSDP", "cp", "tp", "whole head", "pp")


@pytest.mark.slow
@pytest.mark.parametrize("axis", slow_but(["cp"], AXES))
def test_expected_bytes_of_an_axis(axis, checkpoint):
    measured = result_of(run_processes(COUNT, 1, str(checkpoint), axis, {"pp": "3", "HSDP": "4"}.get(axis, "2")))
    times = {"recv_.default": 0, "all_gather_into_tensor.default": 1 / 2, "reduce_scatter_tensor.default": 1 / 2}
    if axis == "cp":  # both are summed
        times = {}
    counted = 4 * sum(times.get(name, 1) * size for name, size in measured["numbers"].items())
    if axis == "pp":  # the middle stage was counted; the other two send in one direction
        assert measured["expected"] == pytest.approx({"pp": counted * 2 / 3})
        return
    sharding = measured["of_fsdp"].get("bytes", 0) / 2
    expected = {"dp_shard": {"dp_shard": sharding}, "cp": {"dp_shard x cp": sharding, "cp": counted / 2}}
    expected["HSDP"] = {"dp_replicate": measured["of_fsdp"].get("summed"), "dp_shard": sharding}
    of_norms = 4 * 6 * 64
    extra = {"cp": 4, "tp": of_norms, "whole head": of_norms}.get(
        axis, 0
    )  # the loss; the norms between the parts of 3 blocks
    close = pytest.approx(expected.get(axis, {"tp": counted}), rel=1e-6, abs=extra)  # a sum over 2 sends all of it
    assert measured["expected"] == close


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp_shard", "cp"])
def test_expected_bytes_of_zero_stages(axis, checkpoint):
    """The table of docs/layouts.md for two micro-batches on 2 processes."""
    times = {0: (0, 2 * 2), 1: (1, 1), 2: (1, 2), 3: (2 * 2, 2)}
    for stage, (gathered, reduced) in times.items():
        measured = result_of(run_processes(COUNT, 1, str(checkpoint), axis, "2", str(stage)))
        measured["expected"].pop("cp", None)
        (sent,) = measured["expected"].values()
        of_fsdp = measured["of_fsdp"]
        assert sent == (of_fsdp["summed"] if stage == 0 else of_fsdp["bytes"] / 2), stage
        assert 0.8 <= sent / measured["bytes"] / (gathered + reduced) * 2 <= 1  # norm and head are gathered once
        counted = {kind: of_fsdp.get(f"{kind} calls", 0) for kind in ("gathered", "scattered", "summed")}
        assert tuple(counted.values()) == {0: (0, 0, 10), 1: (5, 5, 0), 2: (5, 10, 0), 3: (18, 10, 0)}[stage], stage
        assert list(measured["expected"]) == [("dp_replicate" if stage == 0 else "dp_shard") + " x cp" * (axis == "cp")]


@pytest.mark.slow
def test_expected_bytes_of_experts(tmp_path):
    folder = save_checkpoint(tmp_path / "mixture", "MixtralConfig", **EXPERTS)
    measured = result_of(run_processes(Path(__file__).with_name("count_exchanged.py"), 2, str(folder)))
    assert measured["expected"]["ep"] == pytest.approx(measured["counted"])
